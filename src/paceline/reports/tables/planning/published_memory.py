"""Table of published peak memory against the planner's predictions, by framework."""

import statistics
from collections.abc import Sequence

from paceline.records import Record
from paceline.reports.tables.table import Table

_ALL = "all that "
_LIMIT = 0.06


def published_memory_table(records: Sequence[Record]) -> Table:
    """Returns a row per framework: errors of peaks, and counts of correct fit verdicts."""
    rows = []
    for framework in dict.fromkeys(str(record.case["framework"]) for record in records):
        own = [record for record in records if record.case["framework"] == framework]
        errors = [abs(relative_error(record)) for record in own if "peak_bytes" in record.metrics]
        ran, failed = (_verdicts(own, outcome) for outcome in ("ran", "out of memory"))
        rows.append(
            (
                framework,
                str(len(errors)) if errors else "",
                *(
                    (f"{statistics.median(errors):.1%}", f"{statistics.mean(errors):.1%}")
                    if errors
                    else ("", "")
                ),
                f"{max(errors):.1%}" if errors else "",
                f"{sum(error <= _LIMIT for error in errors)}" if errors else "",
                f"{ran.get('fits', 0):,} of {ran.get('fits', 0) + ran.get('refused', 0):,}",
                f"{failed.get('refused', 0)} of {sum(failed.values())}" if failed else "",
            )
        )
    rows.sort(key=lambda row: (not row[1], row[0]))
    return Table(
        headers=(
            *("framework", "peaks", "median error", "mean", "largest", f"within {_LIMIT:.0%}"),
            *("runs that ran, said to fit", "runs out of memory, said so"),
        ),
        rows=tuple(rows),
        caption="peak memory of a device, predicted with the row's model left out of every fit",
    )


def relative_error(record: Record) -> float:
    """Returns the relative error of the predicted peak."""
    return record.metrics["predicted_bytes"].value / record.metrics["peak_bytes"].value - 1


def _verdicts(records: Sequence[Record], outcome: str) -> dict[str, int]:
    return {
        str(record.case["verdict"]): int(record.metrics["rows"].value)
        for record in records
        if record.case["run"] == _ALL + outcome
    }
