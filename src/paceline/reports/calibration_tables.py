"""How well calibrations of the same place agree with each other."""

import statistics
from collections.abc import Iterable, Iterator, Sequence

from paceline.accounting.calibration import Calibration
from paceline.accounting.calibration_records import calibration_runs
from paceline.core.units import KIB, MIB
from paceline.records import Record
from paceline.reports.tables import Table

# Where the cuts of a piecewise fit lie differs from run to run; what it says of a size can be
# compared.
_SIZES = (64 * KIB, MIB, 25 * MIB)


def repeats_table(records: Iterable[Record]) -> Table:
    """Makes a table of what differs between repeated calibrations, by quantity.

    Every number is compared with the median of its repetitions.
    """
    runs = calibration_runs(records)
    deviations: dict[str, list[float]] = {}
    for (label, _), values in _repeated(runs).items():
        middle = statistics.median(values)
        deviations.setdefault(label, []).extend(abs(value / middle - 1) for value in values)
    everything = [deviation for group in deviations.values() for deviation in group]
    return Table(
        headers=("quantity", "numbers", "median deviation", "nine in ten below", "largest"),
        rows=tuple(
            (label, str(len(group)), *_summary(group))
            for label, group in (*deviations.items(), ("all", everything))
        ),
        caption=f"{len(runs)} calibrations in a row, each number against the median of its own",
    )


def _repeated(runs: Sequence[Calibration]) -> dict[tuple[str, object], list[float]]:
    """Returns the values of all runs by label and what they are of."""
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
    yield "elementwise", None, run.stream_element_s
    yield "memory", None, run.copy_element_s
    yield "calls", "forward", run.forward_call_s
    yield "calls", "backward", run.backward_call_s
    yield "optimizer", None, run.optimizer_element_s
    for operation, fit in run.collectives.items():
        for size in _SIZES:
            yield "collectives, 64 KiB to 25 MiB", (operation, size), fit.time_s(size)
    for operation, contention in run.contentions.items():
        yield "contention: lost per byte", operation, contention.lost_s_per_byte
        yield "contention: slowdown", operation, contention.slowdown


def _summary(group: Sequence[float]) -> tuple[str, str, str]:
    ninth = sorted(group)[int(0.9 * (len(group) - 1))]
    return f"{statistics.median(group):.1%}", f"{ninth:.1%}", f"{max(group):.1%}"
