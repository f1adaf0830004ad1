"""Tables of a sweep's runs: planned, running and ended, with predictions and measurements."""

from collections.abc import Sequence

from paceline.core.plan import Estimate
from paceline.core.units import format_seconds
from paceline.reports.tables.columns import with_interval
from paceline.reports.tables.table import Table
from paceline.workflows.sweep.cost import expected_time_s
from paceline.workflows.sweep.design import CHECKS, FIT, PlannedRun
from paceline.workflows.sweep.directory import RunRow, SweepDirectory

_HEADERS = (
    *("run", "parameters", "tokens", "FLOPs", "learning rate", "batch tokens"),
    *("expected loss", "loss", "expected time", "time"),
)


def sweep_table(directory: SweepDirectory) -> Table:
    """Returns a table of every planned run, with its predictions and measurements."""
    rows = {row.name: row for row in directory.rows(*CHECKS, FIT)}
    runs = directory.state().runs
    ended = list(rows.values())
    spent = sum(row.flops for row in ended)
    return Table(
        headers=_HEADERS,
        rows=tuple(_cells(run, rows.get(run.name), ended) for run in runs),
        caption=f"{len(ended)} of {len(runs)} planned runs have ended, {spent:.3g} of "
        f"{sum(run.flops for run in runs):.3g} FLOPs",
        notes=tuple(
            f"{row.name}: {row.outcome}: {row.reason}" for row in ended if row.reason is not None
        ),
    )


def plan_table(runs: Sequence[PlannedRun], times_s: Sequence[float | None]) -> Table:
    """Returns a table of planned runs, with predicted times if all are known."""
    has_times = None not in times_s
    times = [(_time(time_s),) if has_times else () for time_s in times_s]
    return Table(
        headers=(*_HEADERS[:6], "expected time") if has_times else _HEADERS[:6],
        rows=tuple((*_size(run), *time) for run, time in zip(runs, times, strict=True)),
        caption=f"{len(runs)} runs, {sum(run.flops for run in runs):.3g} FLOPs",
    )


def _cells(run: PlannedRun, row: RunRow | None, ended: Sequence[RunRow]) -> tuple[str, ...]:
    # Predict from the other runs only, even if this one has ended.
    time_s = expected_time_s(run, [each for each in ended if each.name != run.name])
    loss = "" if row is None else row.outcome if row.final_loss is None else f"{row.final_loss:.4f}"
    took = "" if row is None else format_seconds(row.time_s)
    return (*_size(run), _loss(run.expected_loss), loss, _time(time_s), took)


def _size(run: PlannedRun) -> tuple[str, ...]:
    return (
        run.name,
        f"{run.parameters:,}",
        f"{run.tokens:,}",
        f"{run.flops:.3g}",
        f"{run.learning_rate:.2g}",
        f"{run.tokens // run.steps:,}",
    )


def _loss(expected: Estimate | None) -> str:
    return "" if expected is None else with_interval(expected, "{:.3f}".format)


def _time(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)
