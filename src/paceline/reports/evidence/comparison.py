"""Whether two measured times differ, judged by the spread of their samples.

The one test of the project: is 1 inside of the interval of a ratio of medians? The interval of a
median follows from the order of the values alone: the narrowest two of them that hold the median
between them with 95%. Fewer than six values cannot hold it with that; then nothing is concluded.

Strategies that take their steps in turn are compared round by round, so that what slowed both is
not mistaken for a difference. What ran one after the other has no rounds, and the machine may have
changed in between.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from paceline.records import Metric

Standing = Literal["less", "more", "alike", "unknown"]

_FEWEST_SAMPLES = 6
"""With fewer, not even the smallest and the largest hold the median between them with 95%."""
_DRIFT = 0.05
"""What a machine may change from one run to the next."""
_TAILS = 40
"""One part in so many of the probability may lie beyond either end of an interval."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratio:
    """A time as a multiple of another."""

    value: float
    """The ratio of the medians."""
    low: float
    """The lower end of its interval."""
    high: float
    """The upper end of its interval."""
    num_samples: int
    """The number of rounds, or the smaller of the two numbers of samples."""

    @property
    def standing(self) -> Standing:
        """Whether the first is less than the second, more, or cannot be told apart from it."""
        if self.num_samples < _FEWEST_SAMPLES:
            return "unknown"
        if self.high < 1:
            return "less"
        return "more" if self.low > 1 else "alike"


def compare(subject: Metric, baseline: Metric, *, in_turn: bool = False) -> Ratio | None:
    """Divides one metric by another; None where there is nothing to divide by.

    Samples that both took in turn are compared round by round; in different numbers they cannot be.
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
    """Returns the two values that hold the median between them with at least 95%.

    Of fewer than six these are the smallest and the largest, which hold it with less.
    """
    ordered = sorted(values)
    # Each value lies below the median as a fair coin falls: leave out what the tail allows.
    outside, tail = 0, 1 + len(ordered)
    while _TAILS * tail <= 2 ** len(ordered):
        outside += 1
        tail += math.comb(len(ordered), outside + 1)
    return ordered[outside], ordered[-1 - outside]


def stands_out(value: float, metric: Metric) -> bool | None:
    """Whether one more sample lies beyond all of a metric's; None where these are too few.

    The interval of the median would be too narrow: it leaves out most of many samples.
    """
    if len(metric.samples) < _FEWEST_SAMPLES:
        return None
    return not min(metric.samples) <= value <= max(metric.samples)
