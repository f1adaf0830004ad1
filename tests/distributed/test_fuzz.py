"""Random training programs: every container must train like one process.

    python -m studies.parallel.fuzz sharded 1000

runs many and records the outcome. A failure prints the seeds;
`studies.parallel.fuzz KIND 1 --first SEED` runs one of them again.
"""

from collections.abc import Callable

import pytest

from paceline.parallel import RankPool
from tests.distributed.fuzz import MAKE, TOLERANCE, run_programs

Pools = Callable[[int], RankPool]


def _require_equal(pool: RankPool, kind: str, seeds: range) -> None:
    for outcomes in pool.run(run_programs, kind, seeds):
        assert not [outcome for outcome in outcomes if outcome.difference > TOLERANCE]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", MAKE)
def test_random_programs_equal_one_process(rank_pool: Pools, kind: str) -> None:
    _require_equal(rank_pool(3), kind, range(5))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", MAKE)
def test_a_thousand_random_programs_equal_one_process(rank_pool: Pools, kind: str) -> None:
    for first in range(0, 1000, 20):  # Each within the time of a run.
        _require_equal(rank_pool(3), kind, range(first, first + 20))
