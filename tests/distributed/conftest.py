"""Ranks that stay warm for the whole run: starting them takes seconds, using them does not."""

from collections.abc import Callable, Iterator

import pytest

from paceline.parallel import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """Returns pools by world size, made when first asked for."""
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size, timeout_s=60)
        return pools[world_size]

    yield get
    for pool in pools.values():
        pool.close()
