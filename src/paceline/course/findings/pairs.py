"""Pairs of records that differ in one field, and the ratio of their forward and backward times."""

from collections.abc import Callable, Sequence

from paceline.records import CaseValue, Metric, Record
from paceline.reports.evidence.comparison import Ratio, compare


def pairs_with_base(
    records: Sequence[Record], field: str, base: CaseValue, key: Callable[[Record], object]
) -> list[tuple[Record, Record]]:
    """Pairs each measured record with the one of the same key whose `field` is `base`."""
    measured = [record for record in records if record.metrics]
    bases = {key(record): record for record in measured if record.case[field] == base}
    return [
        (record, bases[key(record)])
        for record in measured
        if record.case[field] != base and key(record) in bases
    ]


def both_passes(record: Record) -> Metric:
    """Returns the time of forward plus backward.

    Step records and older records have no such metric; their two times are added.
    """
    both = record.metrics.get("both_time_s")
    if both is not None:
        return both
    passes = [record.metrics[f"{name}_time_s"] for name in ("forward", "backward")]
    samples = [sum(pair) for pair in zip(*(each.samples for each in passes), strict=False)]
    return Metric.from_samples(samples or [sum(each.value for each in passes)])


def compare_passes(subject: Record, baseline: Record) -> Ratio | None:
    """Compares the time of forward plus backward of two cases that did not run interleaved."""
    return compare(both_passes(subject), both_passes(baseline))
