from collections.abc import Callable
from typing import get_args

import pytest
import torch

from paceline.benchmarks import collectives as communication
from paceline.benchmarks.collectives import Collective, measure_collective, time_call
from paceline.benchmarks.config import CollectiveCase, CollectiveSweep
from paceline.core.strategies import Operation
from paceline.parallel import RankError, RankPool
from tests import devices
from tests.distributed.device_pool import DevicePool

Pools = Callable[[int], RankPool]


def _check(_rank: int, world_size: int, operation: Operation, size_bytes: int) -> int:
    collective = Collective(operation, size_bytes, devices.own_device())
    collective.check()
    assert collective.num_elements % world_size == 0
    return collective.size_bytes


def _check_wrong(rank: int, _world_size: int) -> None:
    collective = Collective("all_reduce", 1000, devices.own_device())
    run = collective.run

    def spoiled() -> None:
        run()
        collective.output[-1] += 1

    collective.run = spoiled  # type: ignore[method-assign]
    collective.check()


def _measure(
    rank: int, _world_size: int, case: CollectiveCase, slow_rank: int | None = None
) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        if rank == slow_rank:

            def slow_time_call(collective: Collective, device: torch.device) -> float:
                return time_call(collective, device) + 5.0

            patch.setattr(communication, "time_call", slow_time_call)
        return measure_collective(devices.own_device(), case).samples


def _check_astray(_rank: int, _world_size: int) -> None:
    collective = Collective("all_to_all", 1000, devices.own_device())
    run = collective.run

    def exchanged() -> None:
        run()
        collective.output.copy_(collective.output.flip(0))

    collective.run = exchanged  # type: ignore[method-assign]
    collective.check()


@pytest.mark.parametrize("operation", get_args(Operation))
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_operation_gives_the_right_result(
    rank_pool: Pools, operation: Operation, world_size: int
) -> None:
    for size_bytes in (1, 1000, 100_001):
        sizes = rank_pool(world_size).run(_check, operation, size_bytes)
        assert abs(sizes[0] - size_bytes) <= 4 * world_size


def test_a_wrong_result_is_noticed() -> None:
    complaint = r"all_reduce of \d+ bytes gave a wrong result"
    with DevicePool(2, timeout_s=60) as pool, pytest.raises(RankError, match=complaint):
        pool.run(_check_wrong)


def test_chunks_that_went_astray_are_noticed() -> None:
    complaint = r"all_to_all of \d+ bytes gave a wrong result"
    with DevicePool(2, timeout_s=60) as pool, pytest.raises(RankError, match=complaint):
        pool.run(_check_astray)


@pytest.mark.parametrize("operation", ["all_reduce", "broadcast"])
def test_all_ranks_report_the_slowest_rank(rank_pool: Pools, operation: Operation) -> None:
    sweep = CollectiveSweep(warmup=1, steps=7, time_limit_s=31)
    case = CollectiveCase(sweep, operation, size_bytes=10**6)
    for slow_rank in (0, 1):
        times = rank_pool(2).run(_measure, case, slow_rank)
        assert times[0] == times[1]
        assert len(times[0]) == 6
        assert all(seconds > 5 for seconds in times[0])


def test_a_time_limit_lowers_the_repetitions_on_all_ranks(rank_pool: Pools) -> None:
    sweep = CollectiveSweep(warmup=1, steps=10_000, time_limit_s=0.05)
    case = CollectiveCase(sweep, "all_reduce", size_bytes=10**7)
    times = rank_pool(2).run(_measure, case)
    assert 3 <= len(times[0]) == len(times[1]) < 1000
