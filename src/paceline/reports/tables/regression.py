"""Table of the metrics that changed between two stores, the worst first."""

from paceline.core.units import format_binary_bytes, format_seconds
from paceline.records import Metric
from paceline.reports.evidence.fields import describe_case, split_fields
from paceline.reports.evidence.regression import Change, StoreComparison
from paceline.reports.tables.table import Table

_MOST_ROWS = 30


def regression_table(found: StoreComparison, tolerance: float) -> Table:
    """Returns a row per metric, up to a maximum number of rows; the notes count the rest."""
    kinds = {change.record.kind for change in found.changes}
    varying = {
        kind: split_fields([each.record for each in found.changes if each.record.kind == kind])[1]
        for kind in kinds
    }
    counts = {
        verdict: sum(change.verdict == verdict for change in found.changes)
        for verdict in ("worse", "alike", "better")
    }
    hidden = len(found.changes) - _MOST_ROWS
    lacking = found.num_only_before, found.num_only_after
    return Table(
        headers=("case", "metric", "before", "after", "ratio", ""),
        rows=tuple(
            _row(change, varying[change.record.kind]) for change in found.changes[:_MOST_ROWS]
        ),
        caption=f"{counts['worse']} worse by more than {tolerance:.0%}, {counts['alike']} alike, "
        f"{counts['better']} better",
        notes=(
            *((f"{hidden} more, which have changed less.",) if hidden > 0 else ()),
            *((f"{lacking[0]} cases are only in the first store.",) if lacking[0] else ()),
            *((f"{lacking[1]} cases are only in the second store.",) if lacking[1] else ()),
        ),
    )


def _row(change: Change, varying: list[str]) -> tuple[str, ...]:
    ratio = change.ratio
    interval = f" ({ratio.low:.3f} to {ratio.high:.3f})" if ratio.num_samples > 1 else ""
    return (
        describe_case(change.record, varying),
        change.metric,
        _written(change.metric, change.before),
        _written(change.metric, change.after),
        f"{ratio.value:.3f}{interval}",
        "" if change.verdict == "alike" else change.verdict,
    )


def _written(name: str, metric: Metric) -> str:
    return (format_binary_bytes if name.endswith("_bytes") else format_seconds)(metric.value)
