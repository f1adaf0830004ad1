"""Runs a sweep and shows its progress: checks the rule, explores, refines, writes rows for the fit.

Each stage plans its runs from the measurements of earlier stages, stores the plan, and executes the
runs that have not ended. A sweep interrupted at any time resumes, and produces the same plan.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import msgspec

from paceline.core.errors import PacelineError
from paceline.core.finding import Finding
from paceline.core.lock import owned
from paceline.core.plan import Estimate
from paceline.core.units import format_duration, format_seconds
from paceline.loop.executors import MOST_ATTEMPTS, Executor, make_task, run_to_end
from paceline.loop.sweep_design import (
    BATCH,
    CHECKS,
    FIT,
    RATE,
    PlannedRun,
    Rule,
    SweepSpec,
    batch_runs,
    best_factor,
    exploring_runs,
    rate_runs,
    refining_runs,
    rule_finding,
    rule_of_rates,
)
from paceline.loop.sweep_directory import (
    ROWS,
    RunResult,
    RunRow,
    SweepDirectory,
    SweepState,
    expected_time_s,
    write_result,
)
from paceline.records.schema import with_interval
from paceline.records.store import UNDECODABLE
from paceline.reports.tables.table import Table
from paceline.scaling.sweep import Sweep, sweep_from_rows
from paceline.training.config import RunConfig
from paceline.training.forecast import Forecast
from paceline.training.metrics import StepRow
from paceline.training.run_directory import EXPECTATION, METRICS

MakeExecutor = Callable[[SweepState], Executor]
"""Creates the executor on demand; the state gives the number of concurrent runs."""


class SweepFailedError(PacelineError):
    """The sweep has no usable baseline, so its runs cannot be compared."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRunner:
    """Runs a sweep.

    Args:
        directory: Directory of the sweep; it need not exist.
        make_executor: Creates the executor of the runs.
        ranks: Ranks per run.
        threads: Threads per rank, given the number of concurrent runs in the state.
        on_change: Called whenever a run is planned or has ended.
    """

    directory: SweepDirectory
    make_executor: MakeExecutor
    ranks: int
    threads: Callable[[SweepState], int]
    on_change: Callable[[], None]

    def run(self, spec: SweepSpec, base: RunConfig) -> list[Finding]:
        """Executes all missing runs; returns the findings of the check of the rule."""
        with owned(self.directory.path, "paceline sweep"):
            return self._run(self.directory.begin(spec, base).spec)

    def _run(self, spec: SweepSpec) -> list[Finding]:
        self._once(RATE, lambda: rate_runs(spec))
        rate_findings, rule = judge_rates(self.directory.rows(RATE))
        self._once(BATCH, lambda: batch_runs(spec, rule))
        batch_finding, rule = judge_batches(self.directory.rows(BATCH), rule)
        self._once(FIT, lambda: exploring_runs(spec, rule))
        if not self.directory.state().is_refined:
            rows = self.directory.rows(FIT)
            refined = refining_runs(spec, rule, self._sweep(rows), num_before=len(rows))
            self._plan(refined, is_refined=True)
        self._make(FIT)
        return [*rate_findings, batch_finding]

    def rule(self) -> Rule:
        """Returns the rule for learning rates and batches that results from the check."""
        _, rule = judge_rates(self.directory.rows(RATE))
        return judge_batches(self.directory.rows(BATCH), rule)[1]

    def _once(self, purpose: str, plan: Callable[[], Sequence[PlannedRun]]) -> None:
        """Plans the runs of a purpose if necessary, and executes those that have not ended."""
        if all(run.purpose != purpose for run in self.directory.state().runs):
            self._plan(plan())
        self._make(purpose)

    def _plan(self, runs: Sequence[PlannedRun], *, is_refined: bool = False) -> None:
        """Stores planned runs before the first of them begins."""
        state = self.directory.state()
        runs = (*state.runs, *runs)
        self.directory.keep(msgspec.structs.replace(state, runs=runs, is_refined=is_refined))
        self.on_change()

    def _make(self, purpose: str) -> None:
        """Executes the planned runs of a purpose that have not ended."""
        runs = [run for run in self.directory.state().runs if run.purpose == purpose]
        missing = self.directory.open_runs(runs)
        if missing:
            executor = self.make_executor(self.directory.state())
            threads = self.threads(self.directory.state())
            # Longest runs first, so that cores are not idle at the end.
            missing.sort(key=lambda run: -run.flops)
            tasks = [
                make_task(
                    run.name, self.directory.run_config(run), ranks=self.ranks, threads=threads
                )
                for run in missing
            ]
            for _label in run_to_end(executor, tasks):
                self.directory.write_rows()
                self.on_change()
        for run in self.directory.open_runs(missing):
            write_result(
                self.directory.run_directory(run),
                RunResult(outcome="failed", reason=f"killed {MOST_ATTEMPTS} times", time_s=0.0),
            )
        self.directory.write_rows()

    def _sweep(self, rows: Sequence[RunRow]) -> Sweep:
        raw = [msgspec.to_builtins(row) for row in rows]
        return sweep_from_rows(raw, str(self.directory.path / ROWS))


def judge_rates(rows: Sequence[RunRow]) -> tuple[list[Finding], Rule]:
    """Returns the findings of the learning rate check, and the resulting rule."""
    checked = {
        size: _losses([row for row in rows if row.num_parameters == size], RATE)
        for size in sorted({row.num_parameters for row in rows})
    }
    # A model whose baseline run failed is ignored.
    best = {size: best_factor(losses) for size, losses in checked.items() if 1.0 in losses}
    if not best:
        raise _nothing_to_compare(rows)
    rule = rule_of_rates(tuple(best.values()))
    findings = [
        rule_finding(
            "learning_rate_rule",
            f"learning rate of the model with {size:,} parameters",
            checked[size],
            factor,
            rule.learning_rate_factor,
        )
        for size, factor in best.items()
    ]
    return findings, rule


def judge_batches(rows: Sequence[RunRow], rule: Rule) -> tuple[Finding, Rule]:
    """Returns the finding of the batch check, and the resulting rule."""
    losses = _losses(rows, BATCH)
    if 1.0 not in losses:
        raise _nothing_to_compare(rows)
    factor = best_factor(losses)
    finding = rule_finding("batch_rule", "batch size", losses, factor, factor)
    return finding, dataclasses.replace(rule, batch_factor=factor)


def _losses(rows: Sequence[RunRow], purpose: str) -> dict[float, float]:
    """Returns losses by the factor that was varied."""
    return {
        row.learning_rate_factor if purpose == RATE else row.batch_factor: row.final_loss
        for row in rows
        if row.final_loss is not None
    }


def _nothing_to_compare(rows: Sequence[RunRow]) -> SweepFailedError:
    reasons = "; ".join(f"{row.name}: {row.reason}" for row in rows if row.reason)
    return SweepFailedError(
        f"the baseline run (1x Step Law) has no loss, so no run can be compared with it "
        f"({reasons}); see its log.txt"
    )


_TAIL_BYTES = 4096
"""Enough for a few rows; independent of the length of the run."""


def progress_text(directory: pathlib.Path) -> str:
    """Returns the progress of a run in a few words."""
    last, total = _last_step(directory / METRICS), _num_steps(directory / EXPECTATION)
    if last is None or total is None:
        return "starting"
    left_s = (total - last.step) * last.step_time_s
    return (
        f"step {last.step:,} of {total:,}, loss {last.loss:.3f}, about "
        f"{format_duration(left_s)} left"
    )


def _last_step(path: pathlib.Path) -> StepRow | None:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            return msgspec.json.decode(line, type=StepRow)
        except UNDECODABLE:
            continue  # Another kind of row, or an incomplete one.
    return None


def _num_steps(path: pathlib.Path) -> int | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Forecast).num_steps
    except (FileNotFoundError, *UNDECODABLE):
        return None


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
