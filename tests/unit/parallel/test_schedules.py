"""Tests the containers' real code on a simulated device that delays messages arbitrarily.

Seeds decide the order of events in ten thousand training steps, of which an ordinary run takes an
eighth or less. In no schedule may a rank touch memory that a message owns, launch messages in
another order than its peers, or differ from one process. See `simulation` for the method, and
`test_simulated_device` for the faults that it detects.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.parallel import (
    FullyShardedDataParallel,
    OverlapWarning,
    ShardedDataParallel,
    ShardedOptimizer,
)
from tests.unit.parallel.simulation import containers
from tests.unit.parallel.simulation.device import Stream
from tests.unit.parallel.simulation.group import simulated_ranks
from tests.unit.parallel.simulation.live_storages import LiveStorages
from tests.unit.parallel.simulation.training import ANY_ORDER, PROGRAMS, Program, Trainee, explore

CASES: dict[str, tuple[Callable[[], Trainee], dict[str, Program], int]] = {
    "ddp": (containers.bucketed, PROGRAMS | ANY_ORDER, 5000),
    "overlapped": (containers.overlapped, PROGRAMS | ANY_ORDER, 400),
    "zero2": (containers.sharded, PROGRAMS | ANY_ORDER, 4000),
    "fsdp": (containers.fully_sharded, PROGRAMS, 600),
}
"""The container, its programs and the number of schedules of each case."""


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OverlapWarning)
        yield
    torch.set_num_threads(threads)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "eighths", [range(1), pytest.param(range(1, 8), marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.parametrize("name", CASES)
def test_no_schedule_is_wrong(name: str, eighths: range) -> None:
    make, programs, num_schedules = CASES[name]
    num_of_three = num_schedules // 80
    num_of_two = num_schedules // 8 - num_of_three
    for num_ranks, num in ((2, num_of_two), (3, num_of_three)):
        seeds = range(eighths.start * num, eighths.stop * num)
        with simulated_ranks(num_ranks) as (scheduler, device):
            explore(scheduler, device, make, programs, seeds)


def test_a_stream_that_has_waited_orders_no_other() -> None:
    with simulated_ranks(2) as (scheduler, device):

        def make() -> Trainee:
            trainee = containers.sharded()

            def wait_beside() -> None:
                with device.stream(Stream(computes=False)):
                    trainee.container.wait_for_parameters()

            trainee.after_step = wait_beside
            return trainee

        explore(scheduler, device, make, {"one pass": PROGRAMS["one pass"]}, range(50))


_WIDE = 64
_NUM_LAYERS = 12
_LAYER_BYTES = _WIDE * _WIDE * 4


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(_WIDE, _WIDE, bias=False) for _ in range(_NUM_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


SHARDED: dict[str, Callable[[], nn.Module]] = {
    "zero2": lambda: ShardedDataParallel(Deep(), _LAYER_BYTES / 2**20),
    "fsdp": lambda: FullyShardedDataParallel(Deep()),
}


@pytest.mark.parametrize("name", SHARDED)
def test_gradients_take_two_buckets_and_the_shard(name: str) -> None:
    def program(_rank: int) -> int:
        container = SHARDED[name]()
        optimizer: Any = torch.optim.SGD(container.parameters())
        if isinstance(container, ShardedDataParallel):
            optimizer = ShardedOptimizer(container.parameters(), torch.optim.SGD)
        container(torch.ones(1, _WIDE)).sum().backward()
        optimizer.zero_grad()
        # From the second pass on, the order of the layers is known.
        loss = container(torch.ones(1, _WIDE)).sum()
        with LiveStorages(at_least=_LAYER_BYTES // 4) as live:
            loss.backward()
        optimizer.step()
        if isinstance(container, ShardedDataParallel):
            container.wait_for_parameters()
        return live.peak_bytes

    with simulated_ranks(2) as (scheduler, device):
        for seed in range(5):
            shard = _NUM_LAYERS * _LAYER_BYTES // 2
            # Plus one parameter's gradient, which autograd has just computed, and padding of
            # messages to 64 bytes.
            bound = 2 * _LAYER_BYTES + shard + _LAYER_BYTES + 3 * 64
            assert max(scheduler.run(program, seed)) <= bound
            device.reset()
