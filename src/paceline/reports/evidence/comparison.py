"""Tests whether two measured times differ, based on the spread of their samples.

The project uses one test everywhere: does the confidence interval of the ratio of medians contain
1? The interval of a median is distribution-free: the narrowest pair of order statistics that
contains the median with at least 95% probability. No pair of fewer than six values reaches 95%, so
the verdict is then "unknown".

Strategies with interleaved steps are compared round by round, which cancels slowdowns that affect
both. Cases that ran one after the other have no common rounds, and the machine may have drifted in
between. Their interval is widened to allow for that.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from paceline.records import Metric

Standing = Literal["less", "more", "alike", "unknown"]

_FEWEST_SAMPLES = 6
"""With fewer, even the smallest and largest contain the median with less than 95%."""
_DRIFT = 0.05
"""Relative change in speed that a machine may show from one run to the next."""
_TAILS = 40
"""At most 1 / `_TAILS` of the probability may lie beyond either end of an interval."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratio:
    """The ratio of two times, with its interval."""

    value: float
    """The ratio of the medians."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""
    num_samples: int
    """The number of rounds, or the smaller of the two numbers of samples."""

    @property
    def standing(self) -> Standing:
        """Whether the first time is less, more, or not clearly different."""
        if self.num_samples < _FEWEST_SAMPLES:
            return "unknown"
        if self.high < 1:
            return "less"
        return "more" if self.low > 1 else "alike"


def compare(subject: Metric, baseline: Metric, *, in_turn: bool = False) -> Ratio | None:
    """Returns the ratio of two metrics, or None if a baseline value is not positive.

    With `in_turn`, interleaved samples are compared round by round. That requires equally many
    samples; otherwise they are compared like separate runs.
    """
    subjects = subject.samples or (subject.value,)
    baselines = baseline.samples or (baseline.value,)
    if baseline.value <= 0 or min(baselines) <= 0:
        return None
    if in_turn and len(subjects) == len(baselines):
        rounds = [first / second for first, second in zip(subjects, baselines, strict=True)]
        low, high = median_interval(rounds)
    else:
        (low, high), (least, most) = median_interval(subjects), median_interval(baselines)
        low, high = low / most / (1 + _DRIFT), high / least * (1 + _DRIFT)
    value = subject.value / baseline.value
    return Ratio(
        value=value,
        low=min(low, value),
        high=max(high, value),
        num_samples=min(len(subjects), len(baselines)),
    )


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the two values that contain the median with at least 95% probability.

    For fewer than six values, returns the smallest and largest, which contain it with less.
    """
    ordered = sorted(values)
    # Each value lies below the median with probability 1/2, so ranks follow a binomial
    # distribution. Drop as many values at each end as its tail allows.
    outside, tail = 0, 1 + len(ordered)
    while _TAILS * tail <= 2 ** len(ordered):
        outside += 1
        tail += math.comb(len(ordered), outside + 1)
    return ordered[outside], ordered[-1 - outside]
