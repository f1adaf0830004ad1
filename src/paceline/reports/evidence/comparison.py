"""How two measured times compare, judged by the spread of their samples.

Strategies that take their steps in turn have rounds: the samples of one round belong together, so
that what slowed both is not mistaken for a difference. What ran one after the other has no rounds,
and the machine may have changed in between. An interval is that of a median and follows from the
order of the values alone: the narrowest two of them that hold the median between them with 95%, or
the smallest and the largest where there are too few for that; then nothing is concluded.
"""

import dataclasses
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
    """Where its interval begins."""
    high: float
    """Where it ends."""
    num_samples: int
    """Of the one that has fewer."""

    @property
    def standing(self) -> Standing:
        """Whether the first is less than the second, more, or cannot be told apart from it."""
        if self.num_samples < _FEWEST_SAMPLES:
            return "unknown"
        if self.high < 1:
            return "less"
        return "more" if self.low > 1 else "alike"

    def describe(self) -> str:
        """Writes the ratio with its interval, such as ``0.733 times (0.720 to 0.751)``."""
        text = f"{self.value:.3g} times"
        return text if self.num_samples < 2 else f"{text} ({self.low:.3g} to {self.high:.3g})"

    def judged_by(self, noun: str) -> str:
        """Says how few samples there are, such as ``judged by 3 rounds only``."""
        if self.num_samples == 1:
            return f"judged by one {noun} only"
        return f"judged by {self.num_samples} {noun}s only"


def paired_ratio(subject: Metric, baseline: Metric) -> Ratio | None:
    """Compares samples round by round; None where there is nothing to divide by.

    Samples in different numbers come from different runs and are compared as those.
    """
    subjects, baselines = _samples(subject), _samples(baseline)
    if len(subjects) != len(baselines):
        return unpaired_ratio(subject, baseline)
    if baseline.value <= 0 or min(baselines) <= 0:
        return None
    value = subject.value / baseline.value
    rounds = [first / second for first, second in zip(subjects, baselines, strict=True)]
    low, high = _median_interval(rounds)
    return _ratio(value, low, high, len(rounds))


def unpaired_ratio(subject: Metric, baseline: Metric) -> Ratio | None:
    """Compares samples of two runs, whatever the machine did in between; None as above."""
    subjects, baselines = _samples(subject), _samples(baseline)
    if baseline.value <= 0 or min(baselines) <= 0:
        return None
    value = subject.value / baseline.value
    (low, high), (least, most) = _median_interval(subjects), _median_interval(baselines)
    return _ratio(
        value,
        low / most / (1 + _DRIFT),
        high / least * (1 + _DRIFT),
        min(len(subjects), len(baselines)),
    )


def _ratio(value: float, low: float, high: float, num_samples: int) -> Ratio:
    return Ratio(value=value, low=min(low, value), high=max(high, value), num_samples=num_samples)


def _samples(metric: Metric) -> Sequence[float]:
    return metric.samples or (metric.value,)


def _median_interval(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    outside = _num_outside(len(ordered))
    return ordered[outside], ordered[-1 - outside]


def _num_outside(num_values: int) -> int:
    """Returns how many values may be left out at either end: a tail of a fair coin's tosses."""
    outside, tail = 0, 1
    ways = num_values
    while _TAILS * (tail + ways) <= 2**num_values:
        outside, tail = outside + 1, tail + ways
        ways = ways * (num_values - outside) // (outside + 1)
    return outside


_DEVIATIONS = 2.0
"""A difference of more than this many standard deviations is not taken for noise."""


def stands_out(value: float, metric: Metric) -> bool | None:
    """Whether a value lies outside of a metric's samples; None where their spread is not known."""
    if metric.std is None:
        return None
    return abs(value - metric.value) > _DEVIATIONS * metric.std


def differ(first: Metric, second: Metric) -> bool | None:
    """Whether two medians lie further apart than their samples; None where that is not known."""
    if first.std is None or second.std is None:
        return None
    return abs(first.value - second.value) > _DEVIATIONS * max(first.std, second.std)
