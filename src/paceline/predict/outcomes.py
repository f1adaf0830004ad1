"""Predictions beside their measurements, and the accuracy of many of them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from paceline.core.plan import Estimate


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
