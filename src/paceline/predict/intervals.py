"""Intervals of predictions, and predictions beside their measurements.

An interval covers nine in ten of the errors of earlier predictions. `conformal_quantile` is the
quantile of split-conformal prediction (Vovk et al. 2005; Lei et al. 2018): if the next error is
exchangeable with n earlier ones, it is at most the ceil(0.9 (n + 1))-th smallest of them with a
probability of at least 0.9.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.core.plan import Estimate

COVERAGE = 0.9
"""Fraction of measurements that an interval is meant to contain."""


def conformal_quantile(errors: npt.ArrayLike) -> float:
    """Returns the ceil(0.9 (n + 1))-th smallest of n absolute errors.

    With fewer than nine errors that rank exceeds n. The result is then the largest error times
    rank / n.
    """
    ordered = np.sort(np.asarray(errors, dtype=np.float64))
    rank = math.ceil(COVERAGE * (len(ordered) + 1))
    if rank > len(ordered):
        return float(ordered[-1]) * rank / len(ordered)
    return float(ordered[rank - 1])


def weighted_quantile(
    values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], fraction: float
) -> float:
    """Returns the smallest value whose cumulated weight reaches `fraction` of all weights."""
    order = np.argsort(values)
    cumulated = np.cumsum(weights[order])
    index = int(np.searchsorted(cumulated, fraction * cumulated[-1]))
    return float(values[order][min(index, len(values) - 1)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionOutcome:
    """A prediction beside its measurement."""

    predicted: Estimate | None
    """The prediction; None if there was none."""
    measured: float

    @property
    def error(self) -> float | None:
        """Relative error of the prediction."""
        return None if self.predicted is None else self.predicted.value / self.measured - 1

    @property
    def is_inside(self) -> bool | None:
        """Whether the interval contains the measured value; None without an interval."""
        if self.predicted is None or self.predicted.low is None or self.predicted.high is None:
            return None
        return self.predicted.low <= self.measured <= self.predicted.high


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Errors of many predictions, and coverage of their intervals."""

    num_predicted: int
    median_error: float
    """Median of the absolute relative errors."""
    ninetieth_error: float
    largest_error: float
    num_intervals: int
    num_inside: int
    median_width: float | None
    """Median half-width of the intervals, relative to the prediction; None without intervals."""

    @property
    def coverage(self) -> float | None:
        """Fraction of measurements inside their interval; None without intervals."""
        return self.num_inside / self.num_intervals if self.num_intervals else None


def accuracy(outcomes: Sequence[PredictionOutcome]) -> Accuracy:
    """Returns the accuracy of the outcomes with a prediction, of which there is at least one."""
    errors = np.abs([each.error for each in outcomes if each.error is not None])
    inside = [each.is_inside for each in outcomes if each.is_inside is not None]
    widths = [
        (each.predicted.high - each.predicted.low) / (2 * each.predicted.value)
        for each in outcomes
        if each.predicted is not None
        and each.predicted.low is not None
        and each.predicted.high is not None
    ]
    return Accuracy(
        num_predicted=len(errors),
        median_error=float(np.median(errors)),
        ninetieth_error=float(np.quantile(errors, 0.9)),
        largest_error=float(errors.max()),
        num_intervals=len(inside),
        num_inside=sum(inside),
        median_width=float(np.median(widths)) if widths else None,
    )
