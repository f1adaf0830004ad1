"""Data-parallel training: launching ranks, containers and sharded optimizers."""

from paceline.parallel.backward_pass import SynchronizationStats
from paceline.parallel.buckets import GradientError
from paceline.parallel.contract import DataParallelContainer, UnusedParameter
from paceline.parallel.ddp import (
    BucketedDataParallel,
    DataParallel,
    FlatDataParallel,
    NaiveDataParallel,
    OverlappedDataParallel,
)
from paceline.parallel.fsdp.container import FullyShardedDataParallel
from paceline.parallel.fsdp.layers import WrapPolicy
from paceline.parallel.module_checks import SynchronizationError
from paceline.parallel.ranks.launch import RankError, RankPool, run_ranks
from paceline.parallel.ranks.pending import CollectiveError
from paceline.parallel.ranks.placement import Placement, is_launched
from paceline.parallel.ranks.session import Session, distributed_session
from paceline.parallel.reducer import OverlapWarning
from paceline.parallel.same_model import DisagreementError
from paceline.parallel.zero.container import ShardedDataParallel
from paceline.parallel.zero.optimizer import ShardedOptimizer
from paceline.parallel.zero.optimizer_state import OptimizerStateError

__all__ = [
    "BucketedDataParallel",
    "CollectiveError",
    "DataParallel",
    "DataParallelContainer",
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
    "WrapPolicy",
    "distributed_session",
    "is_launched",
    "run_ranks",
]
