"""Rank pools shared by the whole test session, because starting ranks takes seconds."""

from collections.abc import Callable, Iterator

import pytest

from paceline.parallel import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """Yields a function that returns the pool of a world size, created on first use."""
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size, timeout_s=60)
        return pools[world_size]

    yield get
    for pool in pools.values():
        pool.close()
