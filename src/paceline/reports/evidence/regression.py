"""Finds regressions between two stores of the same cases.

Only times and bytes are compared; for both, less is better. A change counts if it exceeds the
tolerance and, for metrics with several samples, if their spread does not explain it.
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
