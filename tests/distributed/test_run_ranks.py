import os
import time

import pytest
import torch
import torch.distributed as dist

from paceline.benchmarks.collectives import all_reduce_self_test
from paceline.parallel import RankError, run_ranks

pytestmark = pytest.mark.host("how ranks are started and end")


def _sum_of_ranks(rank: int, world_size: int, factor: int) -> float:
    values = torch.full((3,), float(rank * factor))
    dist.all_reduce(values)
    assert dist.get_world_size() == world_size
    return float(values[0])


def _fail_on_one(rank: int, _world_size: int) -> None:
    if rank == 1:
        raise ValueError("rank one is unhappy")
    dist.barrier()


def _vanish_on_one(rank: int, _world_size: int) -> None:
    if rank == 1:
        os._exit(3)
    time.sleep(60)


def _sleep_on_one(rank: int, _world_size: int) -> None:
    if rank == 1:
        time.sleep(60)


def test_results_come_back_by_rank() -> None:
    assert run_ranks(_sum_of_ranks, 3, 10) == [30.0, 30.0, 30.0]


def test_one_rank_alone() -> None:
    assert run_ranks(_sum_of_ranks, 1, 10) == [0.0]


def test_the_self_test_times_a_call() -> None:
    for times in run_ranks(all_reduce_self_test, 2):
        assert len(times) == 5
        assert all(0 < seconds < 10 for seconds in times)


def test_a_failure_reaches_the_caller_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"rank 1 failed:(?s:.*)_fail_on_one(?s:.*)unhappy"):
        run_ranks(_fail_on_one, 2)


def test_a_vanished_rank_is_named() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 failed: it ended without a result"):
        run_ranks(_vanish_on_one, 2)
    assert time.monotonic() - started < 30


def test_a_late_rank_is_named() -> None:
    with pytest.raises(RankError, match="1 of 2 ranks did not finish within 10 s: 1"):
        run_ranks(_sleep_on_one, 2, timeout_s=10)
