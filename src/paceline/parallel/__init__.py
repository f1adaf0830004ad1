"""Ranks and what they do together."""

from paceline.parallel.agreement import DisagreementError
from paceline.parallel.backward_run import SynchronizationStats
from paceline.parallel.bucketed import BucketedDataParallel
from paceline.parallel.buckets import GradientError
from paceline.parallel.data_parallel import DataParallel, UnusedParameter
from paceline.parallel.flat import FlatDataParallel
from paceline.parallel.fully_sharded import FullyShardedDataParallel
from paceline.parallel.launch import RankError, RankPool, run_ranks
from paceline.parallel.naive import NaiveDataParallel
from paceline.parallel.optimizer_state import OptimizerStateError, merge_shards
from paceline.parallel.overlap_watch import OverlapWarning
from paceline.parallel.overlapped import OverlappedDataParallel
from paceline.parallel.placement import Placement, is_launched
from paceline.parallel.process_group import CollectiveError, Session, distributed_session
from paceline.parallel.sharded_data_parallel import ShardedDataParallel
from paceline.parallel.sharded_optimizer import ShardedOptimizer
from paceline.parallel.synchronization import SynchronizationError

__all__ = [
    "BucketedDataParallel",
    "CollectiveError",
    "DataParallel",
    "DisagreementError",
    "FlatDataParallel",
    "FullyShardedDataParallel",
    "GradientError",
    "NaiveDataParallel",
    "OptimizerStateError",
    "OverlapWarning",
    "OverlappedDataParallel",
    "Placement",
    "RankError",
    "RankPool",
    "Session",
    "ShardedDataParallel",
    "ShardedOptimizer",
    "SynchronizationError",
    "SynchronizationStats",
    "UnusedParameter",
    "distributed_session",
    "is_launched",
    "merge_shards",
    "run_ranks",
]
