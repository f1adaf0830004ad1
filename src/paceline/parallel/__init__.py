"""Data-parallel training: launching ranks, containers and sharded optimizers."""

from paceline.parallel.contract import DataParallelContainer
from paceline.parallel.ddp import (
    BucketedDataParallel,
    DataParallel,
    FlatDataParallel,
    NaiveDataParallel,
    OverlappedDataParallel,
)
from paceline.parallel.fsdp.container import FullyShardedDataParallel
from paceline.parallel.fsdp.layers import WrapPolicy
from paceline.parallel.outer.loop import OuterLoop
from paceline.parallel.ranks.launch import RankError, RankPool, run_ranks
from paceline.parallel.ranks.session import Session, distributed_session
from paceline.parallel.reducer import OverlapWarning, SynchronizationError
from paceline.parallel.traffic import SynchronizationStats
from paceline.parallel.zero.container import ShardedDataParallel
from paceline.parallel.zero.optimizer import ShardedOptimizer

__all__ = [
    "BucketedDataParallel",
    "DataParallel",
    "DataParallelContainer",
    "FlatDataParallel",
    "FullyShardedDataParallel",
    "NaiveDataParallel",
    "OuterLoop",
    "OverlapWarning",
    "OverlappedDataParallel",
    "RankError",
    "RankPool",
    "Session",
    "ShardedDataParallel",
    "ShardedOptimizer",
    "SynchronizationError",
    "SynchronizationStats",
    "WrapPolicy",
    "distributed_session",
    "run_ranks",
]
