"""Intervals from samples and errors: conformal quantiles, bootstrap medians, a normal's quantile.

References: Lei et al. 2018 (arXiv 1604.04173) for split-conformal intervals; Efron 1979 for the
bootstrap.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

NORMAL_90 = 1.645
"""Half-width of a 90% interval of a normal distribution, in standard deviations."""
COVERAGE = 0.9
"""Probability with which an interval contains the next measurement."""


def conformal_quantile(errors: Sequence[float] | Array, coverage: float = COVERAGE) -> float:
    """Returns the width that holds the error of the next case with probability `coverage`.

    It is the ceil(coverage (n + 1))-th smallest of n absolute errors of cases that were predicted
    without their own measurement: the next one is equally likely to have any of n + 1 ranks. With
    too few errors (fewer than nine for 90%) that rank exceeds n, and the result is the largest
    error times rank / n, which no theorem backs.
    """
    if not len(errors):
        raise ValueError("a conformal quantile needs at least one error")
    rank = math.ceil(coverage * (len(errors) + 1))
    ordered = np.sort(np.asarray(errors, dtype=np.float64))
    if rank > len(ordered):
        return float(ordered[-1]) * rank / len(ordered)
    return float(ordered[rank - 1])


def bootstrap_medians(samples: Array, num_draws: int, generator: np.random.Generator) -> Array:
    """Returns the medians of bootstrap replicates along the last axis, which becomes the draws.

    Rows are drawn together: what was measured in one round stays paired.
    """
    size = samples.shape[-1]
    drawn = generator.integers(size, size=(num_draws, size))
    return np.asarray(np.median(samples[..., drawn], axis=-1))


def weighted_quantile(values: Array, weights: Array, fraction: float) -> float:
    """Returns the smallest value whose cumulated weight reaches `fraction` of all weights."""
    order = np.argsort(values)
    cumulated = np.cumsum(weights[order])
    index = int(np.searchsorted(cumulated, fraction * cumulated[-1]))
    return float(values[order][min(index, len(values) - 1)])
