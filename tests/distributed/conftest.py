"""Rank pools shared by the whole test session, because starting ranks takes seconds."""

import multiprocessing
import pathlib
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest

from paceline.parallel import RankPool
from tests.distributed.device_pool import DevicePool

_PRELOADED = [
    *("paceline.parallel.ranks.launch", "paceline.training.run"),
    # The first optimizer of a process imports dynamo; modules of tests import the others.
    *("torch._dynamo", "pytest", "hypothesis"),
]
"""What the fork server of all rank pools imports once, instead of every new rank for 2 s."""
_MOST_THREADS = 16
"""Threads of a rank after which its pool gets new ranks. A thread of gloo polls for every process
group that a test has made, until its rank ends: a thousand of them take all of the machine."""


class CountedPool(DevicePool):
    """A pool that knows how many threads its ranks have."""

    def num_threads(self) -> int:
        """Returns the largest number of threads of a rank; 0 where the system does not say."""
        processes = pathlib.Path("/proc")
        return max(
            (len([*processes.glob(f"{rank.pid}/task/*")]) for rank in self._processes), default=0
        )


class Pools:
    """The pools by world size, each created on first use."""

    def __init__(self) -> None:
        self._pools: dict[int, CountedPool] = {}

    def __call__(self, world_size: int) -> RankPool:
        """Returns the pool of a world size."""
        if world_size not in self._pools:
            self._pools[world_size] = CountedPool(world_size, timeout_s=60)
        return self._pools[world_size]

    def close(self, most_threads: int = 0) -> None:
        """Ends the ranks of all pools that have more threads; their next run starts new ones."""
        for pool in self._pools.values():
            if pool.num_threads() > most_threads:
                pool.close()


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> None:
    """Starts the fork server before the first pool would, which preloads less."""
    multiprocessing.set_forkserver_preload(_PRELOADED)
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Pools]:
    """Yields a function that returns the pool of a world size, created on first use."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(autouse=True)
def _few_threads(rank_pool: Pools) -> Iterator[None]:
    yield
    rank_pool.close(_MOST_THREADS)
