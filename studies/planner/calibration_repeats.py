"""Table of the spread between repeated calibrations of one place."""

import statistics
from collections.abc import Iterable, Iterator, Sequence

from paceline.core.errors import UsageError
from paceline.core.units import KIB, MIB
from paceline.predict.calibration import Calibration, calibration_runs
from paceline.records import Record
from paceline.reports.tables.table import Table

# The breakpoints of a piecewise fit differ from run to run, but its times at fixed sizes can be
# compared.
_SIZES = (64 * KIB, MIB, 25 * MIB)
_FEWEST_RUNS = 2


def repeats_table(records: Iterable[Record]) -> Table:
    """Returns a table of the spread between repeated calibrations of a topology, by quantity.

    The range of a number is its largest minus its smallest value, divided by the median.
    """
    runs = calibration_runs(records)
    if len({tuple(run.topology.values()) for run in runs}) != 1 or len(runs) < _FEWEST_RUNS:
        raise UsageError("repeated calibrations of one place are needed")
    ranges: dict[str, list[float]] = {}
    for (label, _), values in _repeated(runs).items():
        middle = statistics.median(values)
        if middle > 0:
            ranges.setdefault(label, []).append((max(values) - min(values)) / middle)
    everything = [value for group in ranges.values() for value in group]
    return Table(
        headers=("quantity", "numbers", "median range", "largest range"),
        rows=tuple(
            (label, str(len(group)), f"{statistics.median(group):.1%}", f"{max(group):.1%}")
            for label, group in (*ranges.items(), ("all", everything))
        ),
        caption=(
            f"{len(runs)} calibrations in a row; for each number, its largest less its smallest "
            "value, over their median"
        ),
    )


def _repeated(runs: Sequence[Calibration]) -> dict[tuple[str, object], list[float]]:
    """Returns the values of all runs by label and subject."""
    values: dict[tuple[str, object], list[float]] = {}
    for run in runs:
        for label, subject, value in _numbers(run):
            values.setdefault((label, subject), []).append(value)
    return values


def _numbers(run: Calibration) -> Iterator[tuple[str, object, float]]:
    for label, timed in (("linear layers", run.linears), ("attention", run.attentions)):
        for entry in timed:
            yield f"{label}, forward", entry.dimensions, entry.forward_s
            yield f"{label}, backward", entry.dimensions, entry.backward_s
    yield "elementwise", None, run.elementwise_s_per_element
    yield "memory", None, run.copy_s_per_element
    yield "calls", "forward", run.forward_launch_s
    yield "calls", "backward", run.backward_launch_s
    yield "optimizer", None, run.optimizer_s_per_parameter
    for operation, fit in run.collectives.items():
        for size in _SIZES:
            yield "collectives, 64 KiB to 25 MiB", (operation, size), fit.time_s(size)
    for operation, contention in run.contentions.items():
        yield "contention: lost per byte", operation, contention.lost_s_per_byte
        yield "contention: slowdown", operation, contention.slowdown
