"""Whether two measured times differ, and which metrics regressed between two stores.

The project uses one test everywhere: does the confidence interval of the ratio of medians contain
1? The interval of a median is distribution-free: the narrowest pair of order statistics that
contains the median with at least 95% probability. No pair of fewer than six values reaches 95%, so
the verdict is then "unknown".

Strategies with interleaved steps are compared round by round, which cancels slowdowns that affect
both. Cases that ran one after the other have no common rounds, and the machine may have drifted in
between. Their interval is widened to allow for that.

Between two stores, only times and bytes are compared; for both, less is better. A change counts if
it exceeds the tolerance and, for metrics with several samples, if their spread does not explain it.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from paceline.records import Metric, Record, latest_per_case
from paceline.records.store import case_key

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


Verdict = Literal["worse", "better", "alike"]
_UNITS = ("_time_s", "_bytes", "_s_per_byte")
_COUNTED = ("time_s", "exposed_communication_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One metric of one case, before and after."""

    record: Record
    """The record of the case in the second store."""
    metric: str
    before: Metric
    after: Metric
    ratio: Ratio
    verdict: Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreComparison:
    """The comparison of two stores."""

    changes: tuple[Change, ...]
    """All compared metrics, the largest increase first."""
    num_only_before: int
    """Number of cases that are missing or failed in the second store."""
    num_only_after: int

    @property
    def worse(self) -> tuple[Change, ...]:
        """The changes for the worse."""
        return tuple(change for change in self.changes if change.verdict == "worse")


def compare_stores(
    before: Iterable[Record], after: Iterable[Record], tolerance: float
) -> StoreComparison:
    """Compares two stores case by case, using the last record of each case."""
    old, new = (
        {case_key(each): each for each in latest_per_case(records) if each.outcome == "ok"}
        for records in (before, after)
    )
    changes = [
        change
        for key in old.keys() & new.keys()
        for change in _changes(old[key], new[key], tolerance)
    ]
    return StoreComparison(
        changes=tuple(sorted(changes, key=_worst_first)),
        num_only_before=len(old.keys() - new.keys()),
        num_only_after=len(new.keys() - old.keys()),
    )


def _changes(before: Record, after: Record, tolerance: float) -> Iterator[Change]:
    for name in _compared(before, after):
        ratio = compare(after.metrics[name], before.metrics[name])
        if ratio is None:
            continue
        yield Change(
            record=after,
            metric=name,
            before=before.metrics[name],
            after=after.metrics[name],
            ratio=ratio,
            verdict=_verdict(ratio, tolerance),
        )


def _compared(before: Record, after: Record) -> Sequence[str]:
    return [
        name
        for name in before.metrics
        if name in after.metrics and (name.endswith(_UNITS) or name in _COUNTED)
    ]


def _verdict(ratio: Ratio, tolerance: float) -> Verdict:
    # A single value has no spread. Bytes are exact; a single time is taken at face value.
    can_tell = ratio.num_samples == 1
    if ratio.value > 1 + tolerance and (can_tell or ratio.standing == "more"):
        return "worse"
    if ratio.value < 1 / (1 + tolerance) and (can_tell or ratio.standing == "less"):
        return "better"
    return "alike"


def _worst_first(change: Change) -> tuple[float, str, str]:
    return -change.ratio.value, str(sorted(map(str, change.record.case.items()))), change.metric
