"""Tests that the simulated device detects violations of each of its rules.

First with small programs of one fault each, then with faults injected into the real code.
"""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from paceline.parallel import ddp
from paceline.parallel.buckets import Bucket
from paceline.parallel.ranks.pending import Pending
from tests.unit.parallel.simulation.containers import bucketed, fully_sharded, sharded
from tests.unit.parallel.simulation.device import Device, Event, Stream
from tests.unit.parallel.simulation.group import simulated_ranks
from tests.unit.parallel.simulation.scheduler import Scheduler, ViolationError
from tests.unit.parallel.simulation.training import PROGRAMS, explore


@pytest.fixture
def ranks() -> Iterator[tuple[Scheduler, Device]]:
    with simulated_ranks(2) as simulated:
        yield simulated


def run(ranks: tuple[Scheduler, Device], program: Callable[[int], Any]) -> list[list[Any]]:
    """Runs a program with twenty seeds; returns the results of each run."""
    scheduler, device = ranks
    results = []
    for seed in range(20):
        try:
            results.append(scheduler.run(program, seed))
            device.reset()
        except ViolationError:
            device.clear()
            raise
    return results


def start_sum(values: torch.Tensor) -> dist.Work:
    work = dist.all_reduce(values, async_op=True)
    assert work is not None
    return work


def test_collectives_compute_what_they_say(ranks: tuple[Scheduler, Device]) -> None:
    def program(rank: int) -> list[list[float]]:
        values = torch.arange(4.0) + rank
        total, largest, row, shard = values.clone(), values.clone(), values.clone(), torch.empty(2)
        gathered, swapped = torch.empty(8), torch.empty(4)
        dist.all_reduce(total)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        dist.broadcast(row, 1)
        dist.reduce_scatter_single(shard, values)
        dist.all_gather_single(gathered, values)
        dist.all_to_all_single(swapped, values)
        return [t.tolist() for t in (total, largest, row, shard, gathered, swapped)]

    for first, second in run(ranks, program):
        assert first[:3] == second[:3] == [[1, 3, 5, 7], [1, 2, 3, 4], [1, 2, 3, 4]]
        assert (first[3], second[3]) == ([1, 3], [5, 7])
        assert first[4] == second[4] == [0, 1, 2, 3, 1, 2, 3, 4]
        assert (first[5], second[5]) == ([0, 1, 1, 2], [2, 3, 3, 4])


def test_the_same_seed_gives_the_same_order(ranks: tuple[Scheduler, Device]) -> None:
    scheduler, device = ranks
    seen: list[int] = []

    def program(rank: int) -> None:
        for _ in range(5):
            values = torch.zeros(1)
            work = start_sum(values)
            seen.append(rank)
            work.wait()

    orders = set()
    for seed in range(30):
        both = []
        for _ in range(2):
            seen.clear()
            scheduler.run(program, seed)
            device.reset()
            both.append(tuple(seen))
        assert both[0] == both[1]
        orders.add(both[0])
    assert len(orders) > 10


def test_what_is_read_too_early_is_nonsense(ranks: tuple[Scheduler, Device]) -> None:
    def program(_rank: int) -> bool:
        values = torch.ones(2)
        work = start_sum(values)
        early = values.clone()
        work.wait()
        assert values.tolist() == [2, 2]
        return bool(early.isnan().all())

    assert any(nonsense for result in run(ranks, program) for nonsense in result)


def write_too_early(_rank: int) -> None:
    values = torch.ones(2)
    work = start_sum(values)
    values.zero_()
    work.wait()


def change_what_is_sent(_rank: int) -> None:
    values, shard = torch.ones(2), torch.empty(1)
    work = dist.reduce_scatter_single(shard, values, async_op=True)
    values.zero_()
    work.wait()


def release_too_early(_rank: int) -> None:
    start_sum(torch.ones(2)).wait()


def free_too_early(_rank: int) -> None:
    values = torch.ones(2)
    work = start_sum(values)
    values.untyped_storage().resize_(0)
    work.wait()


def launch_in_another_order(rank: int) -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    works = [start_sum(tensor) for tensor in (reversed(tensors) if rank else tensors)]
    for work in works:
        work.wait()


def launch_on_one_rank_only(rank: int) -> None:
    values = torch.ones(2)
    if rank == 0:
        start_sum(values).wait()


def forget_to_wait(_rank: int) -> torch.Tensor:
    values = torch.ones(2)
    start_sum(values)
    return values


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (write_too_early, "wrote to what all-reduce of 2 x torch.float32 still receives into"),
        (change_what_is_sent, "changed what reduce-scatter of 2 x torch.float32 still sends"),
        (release_too_early, "released memory that all-reduce"),
        (free_too_early, "released memory that all-reduce"),
        (launch_in_another_order, "launch 0 of rank"),
        (launch_on_one_rank_only, "wait for each other"),
        (forget_to_wait, "nobody waited for all-reduce"),
    ],
)
def test_a_fault_is_seen(
    ranks: tuple[Scheduler, Device], program: Callable[[int], Any], message: str
) -> None:
    with pytest.raises(ViolationError, match=message):
        run(ranks, program)


def test_waiting_in_one_stream_orders_no_other(ranks: tuple[Scheduler, Device]) -> None:
    _, device = ranks

    def program(_rank: int) -> tuple[bool, bool]:
        values = torch.ones(2)
        work = start_sum(values)
        beside = Stream(computes=False)
        with device.stream(beside):
            work.wait()
        early = bool(values.isnan().any())
        device.wait_event(Event(beside))
        return early, bool(values.isnan().any())

    results = [one for result in run(ranks, program) for one in result]
    assert any(early for early, _ in results)
    assert not any(late for _, late in results)


def test_a_message_never_says_that_it_is_complete(ranks: tuple[Scheduler, Device]) -> None:
    def program(_rank: int) -> bool:
        values = torch.ones(2)
        work = start_sum(values)
        work.wait()
        return work.is_completed()

    assert not any(done for result in run(ranks, program) for done in result)


def _do_not_wait(_pending: Pending) -> None:
    pass


def _change_after_launch(real: Callable[..., Any]) -> Callable[..., Any]:
    def start(bucket: Bucket, message: torch.Tensor, group: dist.ProcessGroup) -> Any:
        work = real(bucket, message, group)
        message.zero_()
        return work

    return start


def _by_rank(real: Callable[..., Any]) -> Callable[..., Any]:
    def plan(*arguments: Any) -> Any:
        plans = real(*arguments)
        return plans[::-1] if dist.get_rank() else plans

    return plan


FAULTS: dict[str, tuple[Any, Any]] = {
    "a message is not waited for": (
        sharded,
        lambda: mock.patch.object(Pending, "wait", _do_not_wait),
    ),
    "parameters are not waited for": (
        fully_sharded,
        lambda: mock.patch.object(Pending, "wait", _do_not_wait),
    ),
    "a bucket is written to after its launch": (
        bucketed,
        lambda: mock.patch.object(Bucket, "start", _change_after_launch(Bucket.start)),
    ),
    "ranks launch in orders of their own": (
        bucketed,
        lambda: mock.patch.object(ddp, "plan_buckets", _by_rank(ddp.plan_buckets)),
    ),
}
"""The container of each case, and the patch that injects the fault."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_real_code_is_seen(fault: str) -> None:
    make, put_in = FAULTS[fault]
    programs = {"one pass": PROGRAMS["one pass"]}
    with (
        simulated_ranks(2) as (scheduler, device),
        put_in(),
        pytest.raises(ViolationError) as caught,
    ):
        explore(scheduler, device, make, programs, range(50))
    assert "seed" in caught.value.__notes__[0]
