"""Ranks and what they do together."""

from paceline.parallel.agreement import DisagreementError
from paceline.parallel.backward_run import SynchronizationStats
from paceline.parallel.bucketed import BucketedDataParallel
from paceline.parallel.buckets import GradientError
from paceline.parallel.data_parallel import DataParallel, UnusedParameter
from paceline.parallel.flat import FlatDataParallel
from paceline.parallel.launch import RankError, RankPool, run_ranks
from paceline.parallel.naive import NaiveDataParallel
from paceline.parallel.overlap_watch import OverlapWarning
from paceline.parallel.overlapped import OverlappedDataParallel
from paceline.parallel.placement import Placement, is_launched
from paceline.parallel.process_group import CollectiveError, Session, distributed_session
from paceline.parallel.synchronization import SynchronizationError

__all__ = [
    "BucketedDataParallel",
    "CollectiveError",
    "DataParallel",
    "DisagreementError",
    "FlatDataParallel",
    "GradientError",
    "NaiveDataParallel",
    "OverlapWarning",
    "OverlappedDataParallel",
    "Placement",
    "RankError",
    "RankPool",
    "Session",
    "SynchronizationError",
    "SynchronizationStats",
    "UnusedParameter",
    "distributed_session",
    "is_launched",
    "run_ranks",
]
