"""Table of injected faults: tried, survived and lost, by kind."""

import statistics
from collections.abc import Sequence

from paceline.records import Record
from paceline.reports.tables.table import Table

_RECOVERY = "recovery_time_s"


def chaos_table(faults: Sequence[Record]) -> Table:
    """Returns a row per kind of fault, and one for all faults."""
    by_kind: dict[str, list[Record]] = {}
    for record in faults:
        by_kind.setdefault(str(record.case["fault"]), []).append(record)
    rows = [(kind, *_counts(group)) for kind, group in by_kind.items()]
    return Table(
        headers=("fault", "tried", "survived", "lost", "recovery, median (s)", "worst (s)"),
        rows=(*rows, ("all", *_counts(faults))),
        caption="Survived: the run made another step; recovery is from the end of the fault to it",
        notes=tuple(
            f"{record.case['fault']} {record.case['number']}, {record.case['target']}: "
            f"{record.reason}"
            for record in faults
            if record.reason is not None
        ),
    )


def _counts(group: Sequence[Record]) -> tuple[str, ...]:
    lost = sum(record.outcome != "ok" for record in group)
    times = [record.metrics[_RECOVERY].value for record in group if _RECOVERY in record.metrics]
    return (
        str(len(group)),
        str(len(group) - lost),
        str(lost),
        f"{statistics.median(times):.1f}" if times else "-",
        f"{max(times):.1f}" if times else "-",
    )
