"""Checks every non-empty cell of the docs' table of strategies and features."""

from collections.abc import Callable

import pytest

from paceline.core.strategies import StrategyName
from paceline.parallel import RankError, RankPool
from tests.distributed.strategy_features import FEATURES, show

Pools = Callable[[int], RankPool]

CELLS = [
    pytest.param(strategy, feature, cell, id=f"{strategy}-{feature.strip('`')}")
    for feature, (_, cells) in FEATURES.items()
    for strategy, cell in cells.items()
]


@pytest.mark.parametrize(("strategy", "feature", "cell"), CELLS)
def test_a_cell_of_the_table(
    rank_pool: Pools, strategy: StrategyName, feature: str, cell: str
) -> None:
    pool = rank_pool(2)
    if cell == "yes":
        pool.run(show, strategy, feature)
    else:
        with pytest.raises(RankError, match="UsageError"):
            pool.run(show, strategy, feature)
