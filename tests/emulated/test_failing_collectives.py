"""Collectives of the emulated device fail as NCCL's do: late, and not in their launch."""

import datetime
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.parallel import RankPool
from tests import devices

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_LIMIT_S = 0.4
_LATE_S = 20.0
"""More than any of this takes on a busy machine."""


@pytest.fixture(scope="module")
def left_alone() -> Iterator[RankPool]:
    """Yields ranks whose watchdog tells a failure, and does nothing about it."""
    yield from _pool("0")


@pytest.fixture(scope="module")
def aborting() -> Iterator[RankPool]:
    """Yields ranks whose watchdog aborts a communicator that has failed."""
    yield from _pool("2")


def _pool(handling: str) -> Iterator[RankPool]:
    with pytest.MonkeyPatch.context() as patch, RankPool(2, backend=devices.backend()) as pool:
        patch.setenv(_ERROR_HANDLING, handling)
        pool.run(_do_nothing)
        yield pool


def _do_nothing(_rank: int, _world_size: int) -> None: ...


def _new_group(limit_s: float | None = None) -> Any:
    """Returns a group that may be broken, and whose collectives may take so long."""
    group = dist.new_group()
    if limit_s is not None:
        own = group._get_backend(devices.device_of(dist.get_rank()))
        own._set_default_timeout(datetime.timedelta(seconds=limit_s))
    return group


def _until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + _LATE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _numbers(rank: int) -> torch.Tensor:
    return torch.ones(1000, device=devices.device_of(rank))


def _alone(rank: int, limit_s: float | None = None) -> tuple[Any, Any]:
    """Returns a group and an all-reduce of it in which the other rank takes no part."""
    group = _new_group(limit_s)
    return group, dist.all_reduce(_numbers(rank), group=group, async_op=True)


def _is_idle(rank: int) -> bool:
    return torch.accelerator.current_stream(devices.device_of(rank)).query()


def _error_of(call: Callable[[], object]) -> str:
    with pytest.raises(dist.DistBackendError) as raised:
        call()
    return str(raised.value)


# A collective that exceeds its time.


def _fail_late(rank: int, _world_size: int) -> None:
    if rank == 1:
        _new_group(_LIMIT_S)
        return
    group, work = _alone(rank, _LIMIT_S)
    work.wait()  # Orders the stream; the host goes on.
    assert not work.is_completed()
    assert work.exception() is None
    _until(work.exception)
    assert not work.is_success()
    assert not _is_idle(rank)  # Nobody has ended the collective.
    dist.all_reduce(_numbers(rank), group=group, async_op=True)
    error = _error_of(work.wait)
    assert "[rank 0] all_reduce of 1000 elements, number 1 of its group: timed out after" in error
    torch.accelerator.synchronize()  # That wait has ended all collectives of the group.
    assert "has ended" in _error_of(lambda: dist.all_reduce(_numbers(rank), group=group))


def test_a_timeout_is_no_error_of_the_launch(left_alone: RankPool) -> None:
    left_alone.run(_fail_late)


def _be_released(rank: int, _world_size: int) -> None:
    if rank == 1:
        _new_group(_LIMIT_S)
        return
    group, work = _alone(rank, _LIMIT_S)
    work.wait()
    began = time.monotonic()
    torch.accelerator.synchronize()
    assert time.monotonic() - began > _LIMIT_S / 2
    assert not work.is_success()
    assert "timed out after" in _error_of(lambda: dist.all_reduce(_numbers(rank), group=group))
    assert _numbers(rank).sum().item() == 1000


def test_a_watchdog_that_aborts_releases_the_host(aborting: RankPool) -> None:
    aborting.run(_be_released)


def _wait_with_a_limit(rank: int, _world_size: int) -> None:
    if rank == 1:
        _new_group()
        return
    devices.emulated().clear()
    _, work = _alone(rank)
    error = _error_of(lambda: work.wait(datetime.timedelta(seconds=_LIMIT_S)))
    assert "not over after 400 ms" in error
    kinds = [kind for kind, _ in devices.emulated().synchronizations()]
    assert kinds == ["wait with a limit"]


def test_a_wait_with_a_limit_blocks_the_host(left_alone: RankPool) -> None:
    left_alone.run(_wait_with_a_limit)


# Abort and shutdown.


def _abort(rank: int, _world_size: int, operation: str) -> None:
    group = _new_group()
    if rank == 1:
        return
    numbers = _numbers(rank)
    work = {
        "all_reduce": lambda: dist.all_reduce(numbers, group=group, async_op=True),
        "all_gather": lambda: dist.all_gather_into_tensor(
            torch.empty(2000, device=numbers.device), numbers, group=group, async_op=True
        ),
        "barrier": lambda: dist.barrier(group=group, async_op=True),
        "recv": lambda: dist.irecv(numbers, 1, group=group),
        "batch": lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, numbers, 1, group)])[0],
    }[operation]()
    numbers.sum()
    time.sleep(0.1)
    assert not work.is_completed()
    abort = dist.distributed_c10d._abort_process_group
    threading.Timer(0.2, abort, [group]).start()
    if operation != "barrier":
        work.wait()
    torch.accelerator.synchronize()
    _until(work.is_completed)
    assert not work.is_success()


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "barrier", "recv", "batch"])
def test_an_abort_ends_collectives_in_flight(left_alone: RankPool, operation: str) -> None:
    left_alone.run(_abort, operation)


def _destroy_in_flight(rank: int, _world_size: int) -> list[float]:
    group = _new_group()
    numbers = _numbers(rank)
    if rank == 1:
        time.sleep(0.3)
    work = dist.all_reduce(numbers, group=group, async_op=True)
    dist.destroy_process_group(group)
    assert work.is_success()
    error = _error_of(lambda: group.allreduce([numbers]))
    assert "has ended: shutdown() was called" in error
    return [*set(numbers.tolist())]


def test_a_group_that_is_destroyed_finishes_what_is_in_flight(aborting: RankPool) -> None:
    assert aborting.run(_destroy_in_flight) == [[2.0], [2.0]]


# A peer that is gone.

_PEERS = """
import os, sys
import torch
import torch.distributed as dist

rank, place = int(sys.argv[1]), sys.argv[2]
device = torch.device("emulated", rank)
store = dist.FileStore(place, 2)
dist.init_process_group("emulated", store=store, rank=rank, world_size=2)
numbers = torch.ones(1000, device=device)
dist.all_reduce(numbers)
assert numbers.sum().item() == 2000
if rank == 1:
    store.wait(["launched"])
    os._exit(3)
dist.all_reduce(numbers, async_op=True).wait()
store.set("launched", "")
print("launched", flush=True)
numbers.sum().item()
print("finished", flush=True)
"""


def test_without_its_peer_a_process_is_ended(tmp_path: pathlib.Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != _ERROR_HANDLING}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _PEERS, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    (printed, told), _ = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [-signal.SIGABRT, 3], told
    assert printed == "launched\n"
    assert "emulated device: watchdog: [rank 0] all_reduce of 1000 elements, number 2 of" in told
