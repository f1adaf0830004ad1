"""Runs the stages calibrate, sweep, fit, choose, plan, train and compare, each exactly once.

Every stage writes its decision to a file (`paceline.loop.directory`). If interrupted, the
same command resumes after the last completed stage; within the sweep and the final run, it resumes
from the last checkpoint.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence

from paceline.core.errors import UsageError
from paceline.core.finding import Finding
from paceline.core.host import threads_per_rank
from paceline.core.lock import owned
from paceline.core.plan import Estimate
from paceline.core.specs import BatchShape, ModelShape
from paceline.core.units import format_binary_bytes, format_duration, format_seconds
from paceline.loop.choose import choose_layout, choose_model, final_config, fit_sweep, pilot_config
from paceline.loop.directory import (
    LAYOUT,
    MODEL,
    OUTCOME,
    SWEEP_ENTRIES,
    ChosenLayout,
    ChosenModel,
    LayoutCandidate,
    LoopDirectory,
    LoopSpec,
    LoopStoppedError,
    Outcome,
    PilotRun,
)
from paceline.loop.executors import MOST_ATTEMPTS, Executor, make_task, run_to_end
from paceline.loop.on_paper import expected_final, expected_seconds
from paceline.loop.run_config import run_config
from paceline.loop.sweep import SweepRunner
from paceline.loop.sweep_design import CHECKS, FIT, PlannedRun, Rule, exploring_runs, require_sizes
from paceline.loop.sweep_directory import (
    RunResult,
    RunRow,
    SweepDirectory,
    expected_time_s,
    read_result,
)
from paceline.predict.calibration import calibrations
from paceline.predict.history import HistoryEntry, Quantity, append_history, corrected, read_history
from paceline.records import Record, RecordStore
from paceline.records.schema import with_interval
from paceline.training.config import RunConfig
from paceline.training.forecast import forecast
from paceline.training.run_directory import last_record

Models = Sequence[tuple[ModelShape, BatchShape]]
"""Models, each with the micro-batch of a rank."""
Calibrate = Callable[[Models, int, pathlib.Path], None]
"""Measures models on a number of ranks, and appends the records to a file."""
_Compared = dict[Quantity, tuple[float | None, Estimate | None, float | None]]
"""Formula, prediction and measurement of each quantity."""


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

    def run(self, spec: LoopSpec, base: RunConfig) -> Outcome:
        """Runs every missing stage; returns the outcome of the last."""
        if not self.directory.exists:
            require_sizes(spec.sweep)
        with owned(self.directory.path, "paceline loop"):
            return self._run(self.directory.begin(spec), base)

    def _run(self, spec: LoopSpec, base: RunConfig) -> Outcome:
        self._calibrate_for_sweep(spec, base)
        rule_findings = self.sweep.run(spec.sweep, base)
        self._remember_sweep()
        model = self._choose(spec, rule_findings)
        layout = self._lay_out(base, model)
        self._train(base, model, layout)
        return self._compare(model, layout)

    @property
    def _name(self) -> str:
        return self.directory.path.resolve().name

    def _calibrate_for_sweep(self, spec: LoopSpec, base: RunConfig) -> None:
        runs = [*exploring_runs(spec.sweep, Rule()), expected_final(spec)]
        batches = [(run.shape, _rank_batch(base, run.batch_size, self.sweep.ranks)) for run in runs]
        calibration = self._calibrated("sweep", lambda _ranks: batches)
        at_once = max(self.ranks)
        seconds = expected_seconds(spec, base, calibration, at_once)
        total_s = sum(seconds.values())
        parts = ", ".join(f"{name} {format_duration(value)}" for name, value in seconds.items())
        self.tell("calibrate", [f"predicted time {format_duration(total_s)} in total: {parts}"])
        if self.deadline_s is not None and total_s > self.deadline_s:
            possible = spec.budget * self.deadline_s / total_s
            raise UsageError(
                f"this machine needs about {format_duration(total_s)} for {spec.budget:.3g} "
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

    def _choose(self, spec: LoopSpec, rule_findings: Sequence[Finding]) -> ChosenModel:
        def choose() -> ChosenModel:
            found, rule = fit_sweep(self.directory.sweep), self.sweep.rule()
            return choose_model(spec, found, rule, rule_findings)

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
        path = self.directory.pilot(candidate.ranks).resolve()
        config = pilot_config(base, run, path, candidate.strategy)
        result = self._make(path.name, config, candidate.ranks)
        if result is None or result.outcome != "ok":
            return None
        metrics = last_record(path).metrics
        return PilotRun(
            step_time_s=metrics["step_time_s"].value, memory_bytes=metrics["memory_bytes"].value
        )

    def _train(self, base: RunConfig, model: ChosenModel, layout: ChosenLayout) -> None:
        path, best = self.directory.run.resolve(), layout.chosen
        config = final_config(base, model.run, path, best.strategy)
        if read_result(path) is None:
            self.tell("train", [f"{config.training.steps:,} steps; log: {path / 'log.txt'}"])
        result = self._make(model.run.name, config, best.ranks)
        if result is None or result.outcome != "ok":
            reason = f"killed {MOST_ATTEMPTS} times" if result is None else result.reason
            raise LoopStoppedError(f"the final run failed: {reason}; see {path / 'log.txt'}")

    def _make(self, label: str, config: RunConfig, ranks: int) -> RunResult | None:
        """Runs or resumes a run until it ends; returns None if every attempt was killed."""
        task = make_task(label, config, ranks=ranks, threads=threads_per_rank(ranks))
        for _label in run_to_end(self.trainer, [task]):
            pass
        return read_result(pathlib.Path(task.directory))

    def _compare(self, model: ChosenModel, layout: ChosenLayout) -> Outcome:
        def compare() -> Outcome:
            result = read_result(self.directory.run)
            assert result is not None
            time_s = None if result.is_resumed else result.time_s
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


def sweep_entries(
    sweep: SweepDirectory,
    calibration: pathlib.Path,
    ranks: int,
    history: Sequence[HistoryEntry],
    name: str,
) -> list[HistoryEntry]:
    """Returns entries for every run of a sweep, each predicted from the runs planned before it.

    The calibration is that of the ranks that ran concurrently; `history` is from before the sweep.
    """
    known = calibrations(RecordStore(calibration).read())
    hardware = str(known[0].topology["hardware"])
    state, base = sweep.state(), sweep.base()
    at_once = state.at_once or 1
    rows = {row.name: row for row in sweep.rows(*CHECKS, FIT)}
    made: list[HistoryEntry] = []
    before: list[RunRow] = []
    for run in state.runs:
        row = rows.get(run.name)
        if row is None or row.outcome != "ok":
            continue
        config = run_config(base, run, sweep.run_directory(run))
        step_time_s, memory_bytes = _formulas(config, ranks, calibration, at_once)
        at_hand = hardware, ranks, [*history, *made]
        time_s = expected_time_s(run, before)
        compared: _Compared = {
            "step_time_s": (
                step_time_s,
                None if step_time_s is None else corrected("step_time_s", step_time_s, *at_hand),
                row.step_time_s,
            ),
            "memory_bytes": (
                memory_bytes,
                corrected("memory_bytes", memory_bytes, *at_hand),
                row.memory_bytes,
            ),
            "duration_s": (
                None,
                None if time_s is None else Estimate(value=time_s),
                None if row.is_resumed else row.time_s,
            ),
            "heldout_loss": (None, run.expected_loss, row.final_loss),
        }
        threads = threads_per_rank(ranks * at_once)
        made += _entries(compared, run, name, ranks, threads, hardware)
        before.append(row)
    return made


def _formulas(
    config: RunConfig, ranks: int, calibration: pathlib.Path, at_once: int
) -> tuple[float | None, float]:
    """Returns the step time, if available, and the memory predicted by the formulas."""
    try:
        predicted = forecast(config, ranks, calibration, at_once=at_once)
    except UsageError:
        # A refined run may be too different from the models calibrated before the sweep.
        predicted = forecast(config, ranks)
    return predicted.step_time_s, float(predicted.memory_bytes or 0)


def run_entries(
    model: ChosenModel, layout: ChosenLayout, record: Record, time_s: float | None, name: str
) -> list[HistoryEntry]:
    """Returns entries for the final run: its predictions, paired with its record.

    `time_s` is None of a resumed run, whose attempts are not added up.
    """
    measured = {metric: value.value for metric, value in record.metrics.items()}
    best = layout.chosen
    compared: _Compared = {
        "heldout_loss": (None, model.loss, measured.get("heldout_loss")),
        "step_time_s": (best.step_time_s, layout.step_time_s, measured.get("step_time_s")),
        "memory_bytes": (best.memory_bytes, layout.memory_bytes, measured.get("memory_bytes")),
        "duration_s": (None, layout.duration_s, time_s),
    }
    return list(_entries(compared, model.run, name, best.ranks, layout.threads, layout.hardware))


def _entries(
    compared: _Compared, run: PlannedRun, loop: str, ranks: int, threads: int, hardware: str
) -> Iterator[HistoryEntry]:
    for quantity, (formula, predicted, measured) in compared.items():
        if measured is not None:
            yield HistoryEntry(
                quantity=quantity,
                run=f"{loop}/{run.name}",
                parameters=run.parameters,
                world_size=ranks,
                threads=threads,
                hardware=hardware,
                formula=formula,
                predicted=predicted,
                measured=measured,
            )
