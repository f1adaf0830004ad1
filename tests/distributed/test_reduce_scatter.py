"""Reduce-scatter and all-gather over gloo, by direct messages and by collectives."""

import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from paceline.devices import accelerator
from paceline.parallel import RankPool
from paceline.parallel.ranks import collectives
from paceline.parallel.ranks.collectives import start_all_gather, start_reduce_scatter
from tests import devices

Pools = Callable[[int], RankPool]


def _use(way: str) -> None:
    collectives._MOST_PEERS = {"direct": 16, "collectives": 1}[way]


def _reduce(rank: int, world_size: int, way: str, dtype: torch.dtype) -> None:
    _use(way)
    length = 5
    messages = [torch.arange(length * world_size, dtype=dtype) * (r + 1) for r in range(world_size)]
    own = slice(rank * length, (rank + 1) * length)
    expected = sum(message.float() for message in messages)[own]
    target = torch.full((length,), 100.0)
    # Several in flight at a time; the first one started is the last one waited for.
    pending = [start_reduce_scatter(messages[rank].clone(), dist.group.WORLD) for _ in range(3)]
    for reduction in reversed(pending):
        reduction.wait()  # On an accelerator, only its current stream waits.
        accelerator.synchronize(devices.own_device())
        assert reduction.is_completed()
    pending[0].add_to(target, overwrite=True)
    assert torch.equal(target, expected)
    pending[1].add_to(target, overwrite=False)
    assert torch.equal(target, 2 * expected)
    start_reduce_scatter(torch.empty(0), dist.group.WORLD).wait()
    _use("direct")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["direct", "collectives"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_owners_get_their_sums(
    rank_pool: Pools, world_size: int, way: str, dtype: torch.dtype
) -> None:
    rank_pool(world_size).run(_reduce, way, dtype)


def _gather(rank: int, world_size: int, way: str, even: bool) -> None:
    _use(way)
    lengths = [3] * world_size if even else [2 * r for r in range(world_size)]
    borders = [sum(lengths[:r]) for r in range(world_size + 1)]
    expected = torch.cat([torch.full((n,), float(r)) for r, n in enumerate(lengths)])
    flat = torch.full_like(expected, -1.0)
    flat[borders[rank] : borders[rank + 1]] = rank
    pending = start_all_gather(flat, borders, dist.group.WORLD)
    pending.wait()
    assert torch.equal(flat, expected)
    _use("direct")


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("way", ["direct", "collectives"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_get_every_owners_share(
    rank_pool: Pools, world_size: int, way: str, even: bool
) -> None:
    rank_pool(world_size).run(_gather, way, even)


def _complete_without_waiting(_rank: int, _world_size: int) -> None:
    pending = start_reduce_scatter(torch.ones(2_000_000), dist.group.WORLD)
    deadline = time.monotonic() + 30
    while not pending.is_completed():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_end_shows_without_waiting(rank_pool: Pools) -> None:
    rank_pool(2).run(_complete_without_waiting)


def _profile_while_under_way(_rank: int, world_size: int) -> None:
    flat = torch.ones(3_000_000)
    length = flat.numel() // world_size
    borders = range(0, flat.numel() + 1, length)
    for _ in range(10):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
            pending = [start_all_gather(flat, borders, dist.group.WORLD) for _ in range(5)]
        for one in pending:
            one.wait()


def test_a_profiler_may_stop_while_parameters_are_under_way(rank_pool: Pools) -> None:
    rank_pool(2).run(_profile_while_under_way)


SCRIPT = """
import time
import torch
import torch.distributed as dist
from paceline.parallel import distributed_session
from paceline.parallel.ranks.collectives import start_reduce_scatter

with distributed_session(ranks_per_host=2, timeout_s=120) as session:
    if session.rank == 1:
        pending = start_reduce_scatter(torch.ones(1000, device=session.device), dist.group.WORLD)
        raise SystemExit(3)
    time.sleep(100)
"""


@pytest.mark.slow
def test_a_rank_that_fails_does_not_wait_for_its_messages(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    began = time.monotonic()
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert result.returncode == 3, result.stderr
    assert time.monotonic() - began < 60
