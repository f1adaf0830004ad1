"""How well calibrations of the same place agree with each other."""

import statistics
from collections.abc import Sequence

from paceline.records import CaseValue, Record
from paceline.reports.tables import Table


def repeats_table(records: Sequence[Record]) -> Table:
    """Makes a table of what differs between repeated calibrations, by quantity.

    Every measured number is compared with the median of its repetitions.
    """
    repeated: dict[tuple[str, frozenset[tuple[str, CaseValue]]], list[float]] = {}
    for record in records:
        if record.kind != "calibration" or record.case["quantity"] == "collective":
            # Where a fit is cut into segments differs, so its numbers cannot be paired.
            continue
        case = frozenset(record.case.items())
        for name, metric in record.metrics.items():
            repeated.setdefault((name, case), []).append(metric.value)
    deviations: dict[str, list[float]] = {}
    num_runs = 0
    for (name, case), values in repeated.items():
        middle = statistics.median(values)
        label = f"{dict(case)['quantity']}: {name.removesuffix('_s').replace('_', ' ')}"
        deviations.setdefault(label, []).extend(abs(value / middle - 1) for value in values)
        num_runs = max(num_runs, len(values))
    everything = [deviation for group in deviations.values() for deviation in group]
    return Table(
        headers=("quantity", "numbers", "median deviation", "largest"),
        rows=tuple(
            (label, str(len(group)), f"{statistics.median(group):.1%}", f"{max(group):.1%}")
            for label, group in (*deviations.items(), ("all", everything))
        ),
        caption=f"{num_runs} calibrations in a row, each number against the median of its own",
    )
