"""Rank pools shared by the whole test session, because starting ranks takes seconds."""

import collections
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing import forkserver

import pytest

from paceline.parallel import RankPool

_PRELOADED = [
    *("paceline.parallel.ranks.launch", "paceline.training.run"),
    # The first optimizer of a process imports dynamo; modules of tests import the others.
    *("torch._dynamo", "pytest", "hypothesis"),
]
"""What the fork server of all rank pools imports once, instead of every new rank for 2 s."""
_USES = 20
"""Tests after which a pool gets new ranks. Threads of gloo poll for every process group that a test
has made, until its rank ends: a thousand of them take all of the machine."""


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> None:
    """Starts the fork server before the first pool would, which preloads less."""
    multiprocessing.set_forkserver_preload(_PRELOADED)
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """Yields a function that returns the pool of a world size, created on first use."""
    pools: dict[int, RankPool] = {}
    uses: collections.Counter[int] = collections.Counter()

    def get(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size, timeout_s=60)
        uses[world_size] += 1
        if uses[world_size] % _USES == 0:
            pools[world_size].close()  # The next run starts new ranks.
        return pools[world_size]

    yield get
    for pool in pools.values():
        pool.close()
