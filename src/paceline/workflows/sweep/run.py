"""From a question to rows that a fit reads: check the rule, explore, refine.

Each stage plans its runs from what the stages before it have measured, writes the plan down, and
makes the runs that have not ended. A sweep that was interrupted at any moment goes on where it was
and comes to the same plan.
"""

import dataclasses
from collections.abc import Callable, Sequence

import msgspec

from paceline.core.errors import PacelineError
from paceline.core.finding import Finding
from paceline.scaling.runs.sweep import Sweep, sweep_from_rows
from paceline.training.config import RunConfig
from paceline.workflows.sweep.design import (
    PlannedRun,
    Question,
    check_runs,
    exploring_runs,
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
from paceline.workflows.sweep.rules import Rule, best_factor, rule_finding
from paceline.workflows.sweep.task import RunTask

_MOST_ATTEMPTS = 3
"""How often a run may be killed before it counts as failed."""

MakeExecutor = Callable[[SweepState], Executor]
"""Makes the executor when there is something to run, and the state says how many at a time."""


class SweepFailedError(PacelineError):
    """A sweep that cannot tell anything."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRunner:
    """Makes a sweep.

    Args:
        directory: Where it is, or will be.
        make_executor: Where runs are made.
        ranks: Ranks of a run.
        threads: Threads of a rank, once it is known how many runs share the machine.
        on_change: Called whenever a run is planned or has ended.
    """

    directory: SweepDirectory
    make_executor: MakeExecutor
    ranks: int
    threads: Callable[[SweepState], int]
    on_change: Callable[[], None]

    def run(self, question: Question, base: RunConfig) -> list[Finding]:
        """Makes all runs that are missing; returns what the check of the rule has found."""
        if not self.directory.begin(question, base).runs:
            self._plan(check_runs(question))
        self._make("check")
        findings, rule = judge_rule(self.directory.rows("check"))
        if all(run.purpose == "check" for run in self.directory.state().runs):
            self._plan(exploring_runs(question, rule))
        self._make("fit")
        if not self.directory.state().is_refined:
            rows = self.directory.rows("fit")
            refined = refining_runs(question, rule, self._sweep(rows), num_before=len(rows))
            self._plan(refined, is_refined=True)
        self._make("fit")
        return findings

    def _plan(self, runs: Sequence[PlannedRun], *, is_refined: bool = False) -> None:
        """Writes runs down before the first of them begins."""
        state = self.directory.state()
        runs = (*state.runs, *runs)
        self.directory.keep(msgspec.structs.replace(state, runs=runs, is_refined=is_refined))
        self.on_change()

    def _make(self, purpose: str) -> None:
        """Makes the planned runs of a purpose that have not ended."""
        runs = [run for run in self.directory.state().runs if run.purpose == purpose]
        for _attempt in range(_MOST_ATTEMPTS):
            missing = self.directory.open_runs(runs)
            if not missing:
                break
            executor = self.make_executor(self.directory.state())
            # The longest first, so that no core waits long for the last one.
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


def judge_rule(rows: Sequence[RunRow]) -> tuple[list[Finding], Rule]:
    """Returns what the check has found, and the rule that the other runs follow."""
    losses = {
        (row.learning_rate_factor, row.batch_factor): row.final_loss
        for row in rows
        if row.final_loss is not None
    }
    if (1.0, 1.0) not in losses:
        reasons = "; ".join(f"{row.name}: {row.reason}" for row in rows if row.reason)
        raise SweepFailedError(
            f"the run of the rule itself has no loss, so nothing can be compared ({reasons}); "
            "see its log.txt"
        )
    rates = {rate: loss for (rate, batch), loss in losses.items() if batch == 1.0}
    batches = {batch: loss for (rate, batch), loss in losses.items() if rate == 1.0}
    rule = Rule(learning_rate_factor=best_factor(rates), batch_factor=best_factor(batches))
    return [
        rule_finding("learning_rate_rule", "learning rate", rates, rule.learning_rate_factor),
        rule_finding("batch_rule", "batch", batches, rule.batch_factor),
    ], rule
