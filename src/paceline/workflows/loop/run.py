"""Runs the stages calibrate, sweep, fit, choose, lay out, train and compare, each exactly once.

Every stage writes its decision to a file (`paceline.workflows.loop.directory`). If interrupted, the
same command resumes after the last completed stage; within the sweep and the final run, it resumes
from the last checkpoint.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

from paceline.core.errors import UsageError
from paceline.core.finding import Finding
from paceline.core.specs import BatchShape, ModelShape
from paceline.core.units import format_binary_bytes, format_duration, format_seconds
from paceline.data.storage import LocalStorage
from paceline.predict.history import HistoryEntry, append_history, read_history
from paceline.records.environment import threads_per_rank
from paceline.reports.tables.columns import with_interval
from paceline.training.config import RunConfig
from paceline.training.run_directory import last_record
from paceline.training.toml_config import encode_config
from paceline.workflows.loop.choose import choose_model, fit_sweep
from paceline.workflows.loop.directory import (
    LAYOUT,
    MODEL,
    OUTCOME,
    SWEEP_ENTRIES,
    ChosenLayout,
    ChosenModel,
    LayoutCandidate,
    LoopDirectory,
    LoopQuestion,
    LoopStoppedError,
    Outcome,
    PilotRun,
)
from paceline.workflows.loop.entries import run_entries, sweep_entries
from paceline.workflows.loop.layout import choose_layout, final_config, pilot_config
from paceline.workflows.loop.on_paper import expected_final, expected_seconds
from paceline.workflows.sweep.design import CHECKS, FIT, PlannedRun, exploring_runs, require_sizes
from paceline.workflows.sweep.directory import Ending, read_ending
from paceline.workflows.sweep.executors import Executor
from paceline.workflows.sweep.rules import Rule
from paceline.workflows.sweep.run import SweepRunner
from paceline.workflows.sweep.task import RunTask

Models = Sequence[tuple[ModelShape, BatchShape]]
"""Models, each with the micro-batch of a rank."""
Calibrate = Callable[[Models, int, pathlib.Path], None]
"""Measures models on a number of ranks, and appends the records to a file."""

_MOST_ATTEMPTS = 3
_RUN_CONFIG = "run.toml"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopRunner:
    """Runs every stage of the loop once.

    Args:
        directory: Directory of the loop; it need not exist.
        sweep: Runs the sweep, in the loop's directory.
        trainer: Executes the pilot runs and the final run.
        calibrate: Measures this machine.
        ranks: Numbers of ranks that the final run may have.
        history: The store of all predictions, used to correct new ones.
        deadline_s: Limit on the total duration; None for no limit.
        tell: Called with the name of a stage and the lines that describe its decision.
    """

    directory: LoopDirectory
    sweep: SweepRunner
    trainer: Executor
    calibrate: Calibrate
    ranks: Sequence[int]
    history: pathlib.Path
    deadline_s: float | None
    tell: Callable[[str, Sequence[str]], None]

    def run(self, question: LoopQuestion, base: RunConfig) -> Outcome:
        """Runs every missing stage; returns the outcome of the last."""
        if not self.directory.exists:
            require_sizes(question.sweep)
        question = self.directory.begin(question)
        self._calibrate_for_sweep(question, base)
        rule_findings = self.sweep.run(question.sweep, base)
        self._remember_sweep()
        model = self._choose(question, rule_findings)
        layout = self._lay_out(base, model)
        self._train(base, model, layout)
        return self._compare(model, layout)

    @property
    def _name(self) -> str:
        return self.directory.path.resolve().name

    def _calibrate_for_sweep(self, question: LoopQuestion, base: RunConfig) -> None:
        runs = [*exploring_runs(question.sweep, Rule()), expected_final(question)]
        batches = [(run.shape, _rank_batch(base, run.batch_size, self.sweep.ranks)) for run in runs]
        calibration = self._calibrated("sweep", lambda _ranks: batches)
        at_once = max(self.ranks)
        seconds = expected_seconds(question, base, calibration, at_once)
        total_s = sum(seconds.values())
        parts = ", ".join(f"{name} {format_duration(value)}" for name, value in seconds.items())
        self.tell("calibrate", [f"predicted time {format_duration(total_s)} in total: {parts}"])
        if self.deadline_s is not None and total_s > self.deadline_s:
            possible = question.budget * self.deadline_s / total_s
            raise UsageError(
                f"this machine needs about {format_duration(total_s)} for {question.budget:.3g} "
                f"FLOPs and the sweep, and the deadline is {format_duration(self.deadline_s)}; "
                f"--budget {possible:.1g} would fit"
            )

    def _calibrated(self, stage: str, models: Callable[[int], Models]) -> pathlib.Path:
        """Returns the path of a stage's calibration; runs and writes it atomically if missing."""
        path = self.directory.calibration(stage)
        if path.exists():
            return path
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        for ranks in self.ranks:
            self.calibrate(list(dict.fromkeys(models(ranks))), ranks, partial)
        partial.rename(path)
        return path

    def _remember_sweep(self) -> None:
        entries = self.directory.once(
            SWEEP_ENTRIES,
            tuple[HistoryEntry, ...],
            lambda: tuple(
                sweep_entries(
                    self.directory.sweep,
                    self.directory.calibration("sweep"),
                    self.sweep.ranks,
                    read_history(self.history),
                    self._name,
                )
            ),
        )
        append_history(self.history, entries)

    def _choose(self, question: LoopQuestion, rule_findings: Sequence[Finding]) -> ChosenModel:
        def choose() -> ChosenModel:
            found, rule = fit_sweep(self.directory.sweep), self.sweep.rule()
            return choose_model(question, found, rule, rule_findings)

        model = self.directory.once(MODEL, ChosenModel, choose)
        run, shape = model.run, model.run.shape
        size = f"{shape.num_layers} layers of width {shape.d_model}"
        self.tell(
            "fit",
            [
                f"best N {with_interval(model.parameters, '{:.3g}'.format)}, extrapolated "
                f"to {model.extrapolation:.3g} times the FLOPs of the largest run; runs deviate "
                f"{model.noise:.1%} from the fitted surface",
                f"for comparison: {model.reason}",
                *map(str, model.findings),
            ],
        )
        self.tell(
            "choose",
            [
                f"{run.parameters:,} parameters ({size}), {run.tokens:,} tokens in {run.steps:,} "
                f"steps of {run.batch_size} sequences, learning rate {run.learning_rate:.2g}",
                f"held-out loss {with_interval(model.loss, '{:.4f}'.format)}",
            ],
        )
        return model

    def _lay_out(self, base: RunConfig, model: ChosenModel) -> ChosenLayout:
        def choose() -> ChosenLayout:
            run = model.run
            calibration = self._calibrated(
                "run", lambda ranks: [(run.shape, _rank_batch(base, run.batch_size, ranks))]
            )
            rows = self.directory.sweep.rows(*CHECKS, FIT)
            return choose_layout(
                base, run, self.ranks, calibration, rows, lambda each: self._pilot(base, run, each)
            )

        layout = self.directory.once(LAYOUT, ChosenLayout, choose)
        best = layout.chosen
        tried = [
            f"{each.ranks} x {each.strategy} {format_seconds(each.pilot.step_time_s)}"
            for each in layout.candidates
            if each.pilot is not None
        ]
        self.tell(
            "plan",
            [
                f"{best.ranks} ranks, {best.strategy}: {format_seconds(best.step_time_s)} per step "
                f"by the formulas; pilot runs: {', '.join(tried)}",
                f"step time {with_interval(layout.step_time_s, format_seconds)}, memory per rank "
                f"{with_interval(layout.memory_bytes, format_binary_bytes)}, duration "
                f"{with_interval(layout.duration_s, format_duration)}",
            ],
        )
        return layout

    def _pilot(
        self, base: RunConfig, run: PlannedRun, candidate: LayoutCandidate
    ) -> PilotRun | None:
        """Runs a few steps with a layout; returns None if they fail."""
        place = self.directory.pilot(candidate.ranks).resolve()
        config = pilot_config(base, run, place, candidate.strategy)
        ending = self._make(place.name, config, place, candidate.ranks)
        if ending is None or ending.outcome != "ok":
            return None
        metrics = last_record(place).metrics
        return PilotRun(
            step_time_s=metrics["step_time_s"].value, memory_bytes=metrics["memory_bytes"].value
        )

    def _train(self, base: RunConfig, model: ChosenModel, layout: ChosenLayout) -> None:
        place, best = self.directory.run.resolve(), layout.chosen
        config = final_config(base, model.run, place, best.strategy)
        if read_ending(place) is None:
            self.tell("train", [f"{config.training.steps:,} steps; log: {place / 'log.txt'}"])
        ending = self._make(model.run.name, config, place, best.ranks)
        if ending is None or ending.outcome != "ok":
            reason = f"killed {_MOST_ATTEMPTS} times" if ending is None else ending.reason
            raise LoopStoppedError(f"the final run failed: {reason}; see {place / 'log.txt'}")

    def _make(
        self, label: str, config: RunConfig, place: pathlib.Path, ranks: int
    ) -> Ending | None:
        """Runs or resumes a run until it ends; returns None if every attempt was killed."""
        LocalStorage(place).write(_RUN_CONFIG, encode_config(config).encode())
        task = RunTask(
            label=label,
            directory=str(place),
            config=str(place / _RUN_CONFIG),
            ranks=ranks,
            threads=threads_per_rank(ranks),
        )
        for _attempt in range(_MOST_ATTEMPTS):
            if read_ending(place) is not None:
                break
            for _label in self.trainer.run([task]):
                pass
        return read_ending(place)

    def _compare(self, model: ChosenModel, layout: ChosenLayout) -> Outcome:
        def compare() -> Outcome:
            ending = read_ending(self.directory.run)
            assert ending is not None
            time_s = None if ending.is_resumed else ending.time_s
            record = last_record(self.directory.run)
            rows = self.directory.sweep.rows(*CHECKS, FIT)
            return Outcome(
                entries=tuple(run_entries(model, layout, record, time_s, self._name)),
                sweep_flops=sum(row.flops for row in rows),
                sweep_time_s=sum(row.time_s for row in rows),
                run_flops=model.run.flops,
            )

        outcome = self.directory.once(OUTCOME, Outcome, compare)
        append_history(self.history, outcome.entries)
        return outcome


def _rank_batch(base: RunConfig, batch_size: int, ranks: int) -> BatchShape:
    """Returns the shape of a rank's micro-batch."""
    own = -(-batch_size // ranks)
    return BatchShape(
        num_sequences=min(own, base.training.micro_batch_size),
        context_length=base.data.context_length,
    )
