"""What has become slower or larger between two stores of the same cases.

Times and bytes are compared, of which less is better. A change counts where it is larger than what
is tolerated and, for a metric with samples, beyond what their spread explains.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from paceline.records import Metric, Record, latest_per_case
from paceline.records.store import case_key
from paceline.reports.evidence.comparison import Ratio, compare

Verdict = Literal["worse", "better", "alike"]
_UNITS = ("_time_s", "_bytes", "_s_per_byte")
_COUNTED = ("time_s", "exposed_communication_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One metric of one case, before and after."""

    record: Record
    """Of the case, after."""
    metric: str
    before: Metric
    after: Metric
    ratio: Ratio
    verdict: Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreComparison:
    """Two stores, case by case."""

    changes: tuple[Change, ...]
    """What is worst first."""
    num_only_before: int
    """Cases that the second store lacks, or that failed there."""
    num_only_after: int

    @property
    def worse(self) -> tuple[Change, ...]:
        """What has become worse."""
        return tuple(change for change in self.changes if change.verdict == "worse")


def compare_stores(
    before: Iterable[Record], after: Iterable[Record], tolerance: float
) -> StoreComparison:
    """Joins two stores by their cases; of a case that was measured twice the newest counts."""
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
    # One value has no spread: bytes are exact, and a time of one sample is all there is.
    can_tell = ratio.num_samples == 1
    if ratio.value > 1 + tolerance and (can_tell or ratio.standing == "more"):
        return "worse"
    if ratio.value < 1 / (1 + tolerance) and (can_tell or ratio.standing == "less"):
        return "better"
    return "alike"


def _worst_first(change: Change) -> tuple[float, str, str]:
    return -change.ratio.value, str(sorted(map(str, change.record.case.items()))), change.metric
