"""Bootstrap replicates of a sweep, represented as counts of each run.

A replicate is a row of counts, not a copy of the runs, so that a thousand replicates are one matrix
and every fit processes all of them at once.
"""

from typing import Literal

import numpy as np

from paceline.core.errors import UsageError
from paceline.scaling.runs.sweep import Sweep
from paceline.scaling.surface import Array

MethodName = Literal["lowest_run", "parabola", "envelope", "huber", "parametric"]

DEFAULT_DRAWS = 1000
_FEWEST_ANSWERS = 0.5


def draw_counts(sweep: Sweep, num_draws: int = DEFAULT_DRAWS, seed: int = 0) -> Array:
    """Returns one row per replicate: the number of times it drew each run."""
    size = len(sweep)
    generator = np.random.default_rng(seed)
    return generator.multinomial(size, np.full(size, 1 / size), size=num_draws).astype(np.float64)


def require_replicates(method: MethodName, share: float) -> None:
    """Raises an error if fewer than half of a method's replicates produce an answer."""
    if share < _FEWEST_ANSWERS:
        raise UsageError(
            f"{method}: only {share:.0%} of the bootstrap replicates give an answer, so it has no "
            "interval; add runs at other sizes and budgets"
        )


def widen(value: Array, draws: Array, num_runs: int, num_coefficients: int) -> Array:
    """Widens the draws of a positive number about its estimate, to correct for degrees of freedom.

    A replicate repeats some runs and its fit adapts to them. Its residuals, and therefore the
    spread of the draws, are too small by a factor that depends on coefficients per run.
    """
    factor = np.sqrt(num_runs / max(num_runs - num_coefficients, 1))
    return np.asarray(value * (draws / value) ** factor)
