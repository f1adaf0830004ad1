"""Random training programs: no container may differ from one process.

    python scripts/fuzz.py sharded 1000

runs many, and records the outcome; a failure prints the seeds, of which `scripts/fuzz.py KIND 1
--first SEED` runs one again.
"""

from collections.abc import Callable

import pytest

from paceline.parallel import RankPool
from tests.distributed.fuzz import MAKE, run_programs

Pools = Callable[[int], RankPool]


@pytest.mark.parametrize("kind", MAKE)
def test_random_programs_equal_one_process(rank_pool: Pools, kind: str) -> None:
    for wrong in rank_pool(3).run(run_programs, kind, range(24)):
        assert not wrong, "seed, parameter, relative difference"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", MAKE)
def test_a_thousand_random_programs_equal_one_process(rank_pool: Pools, kind: str) -> None:
    for first in range(0, 1000, 50):
        for wrong in rank_pool(3).run(run_programs, kind, range(first, first + 50)):
            assert not wrong, "seed, parameter, relative difference"
