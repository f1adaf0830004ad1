"""Containers for simulated ranks, with buckets of one or two parameters."""

import torch

from paceline.parallel import (
    BucketedDataParallel,
    FullyShardedDataParallel,
    OverlappedDataParallel,
    ShardedDataParallel,
    ShardedOptimizer,
)
from tests.unit.parallel.simulation.training import RATE, Trainee, make_model

_BUCKET_SIZE_MB = 80 / 2**20


def bucketed() -> Trainee:
    container = BucketedDataParallel(make_model(), _BUCKET_SIZE_MB)
    optimizer = torch.optim.SGD(container.parameters(), lr=RATE)
    return Trainee(container, optimizer, lambda: list(container.module.parameters()))


def overlapped() -> Trainee:
    container = OverlappedDataParallel(make_model())
    optimizer = torch.optim.SGD(container.parameters(), lr=RATE)
    return Trainee(container, optimizer, lambda: list(container.module.parameters()))


def sharded() -> Trainee:
    container = ShardedDataParallel(make_model(), _BUCKET_SIZE_MB)
    optimizer = ShardedOptimizer(container.parameters(), torch.optim.SGD, lr=RATE)
    return Trainee(container, optimizer, lambda: list(container.parameters()))


def fully_sharded() -> Trainee:
    container = FullyShardedDataParallel(make_model())
    optimizer = torch.optim.SGD(container.parameters(), lr=RATE)
    return Trainee(container, optimizer, lambda: list(container.full_state_dict().values()))
