"""Runs a sweep: checks the rule, explores, refines, and writes rows for the fit.

Each stage plans its runs from the measurements of earlier stages, stores the plan, and executes the
runs that have not ended. A sweep interrupted at any time resumes, and produces the same plan.
"""

import dataclasses
from collections.abc import Callable, Sequence

import msgspec

from paceline.core.errors import PacelineError
from paceline.core.finding import Finding
from paceline.scaling.sweep import Sweep, sweep_from_rows
from paceline.training.config import RunConfig
from paceline.workflows.sweep.design import (
    BATCH,
    FIT,
    RATE,
    PlannedRun,
    Question,
    batch_runs,
    exploring_runs,
    rate_runs,
    refining_runs,
)
from paceline.workflows.sweep.directory import (
    ROWS,
    Ending,
    RunRow,
    SweepDirectory,
    SweepState,
    write_ending,
)
from paceline.workflows.sweep.executors import Executor
from paceline.workflows.sweep.rules import Rule, best_factor, rule_finding, rule_of_rates
from paceline.workflows.sweep.task import RunTask

_MOST_ATTEMPTS = 3
"""Number of attempts that may be killed before a run counts as failed."""

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

    def run(self, question: Question, base: RunConfig) -> list[Finding]:
        """Executes all missing runs; returns the findings of the check of the rule."""
        question = self.directory.begin(question, base).question
        self._once(RATE, lambda: rate_runs(question))
        rate_findings, rule = judge_rates(self.directory.rows(RATE))
        self._once(BATCH, lambda: batch_runs(question, rule))
        batch_finding, rule = judge_batches(self.directory.rows(BATCH), rule)
        self._once(FIT, lambda: exploring_runs(question, rule))
        if not self.directory.state().is_refined:
            rows = self.directory.rows(FIT)
            refined = refining_runs(question, rule, self._sweep(rows), num_before=len(rows))
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
        for _attempt in range(_MOST_ATTEMPTS):
            missing = self.directory.open_runs(runs)
            if not missing:
                break
            executor = self.make_executor(self.directory.state())
            # Longest runs first, so that cores are not idle at the end.
            missing.sort(key=lambda run: -run.flops)
            for _label in executor.run(self._tasks(missing)):
                self.directory.write_rows()
                self.on_change()
        for run in self.directory.open_runs(runs):
            reason = f"killed {_MOST_ATTEMPTS} times"
            write_ending(
                self.directory.run_directory(run),
                Ending(outcome="failed", reason=reason, time_s=0.0),
            )
        self.directory.write_rows()

    def _tasks(self, runs: Sequence[PlannedRun]) -> list[RunTask]:
        threads = self.threads(self.directory.state())
        return [
            RunTask(
                label=run.name,
                directory=str(self.directory.run_directory(run).resolve()),
                config=str(self.directory.write_config(run).resolve()),
                ranks=self.ranks,
                threads=threads,
            )
            for run in runs
        ]

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
