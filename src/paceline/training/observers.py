"""Observers of a run: its metrics file, its log, the cost of restarts, and its record.

An observer that fails must not end a run that takes days: the failure is reported once, and the
observer receives no more rows. The panel and the trackers are observers too.
"""

import abc
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from paceline.core.presets import model_preset
from paceline.core.runnable import needs_mesh
from paceline.core.specs import BatchShape
from paceline.core.units import format_decimal, format_duration, format_seconds
from paceline.devices.hardware import describe_hardware
from paceline.kernels.attention.api import resolve_implementation
from paceline.parallel import Session
from paceline.parallel.mesh.layout import describe
from paceline.parallel.ranks.supervisor import Restart
from paceline.records import CaseValue, Record, RecordStore, capture_environment
from paceline.records.kinds import MODEL_FIELDS
from paceline.records.schema import model_case_fields
from paceline.training.config import RunConfig
from paceline.training.forecast import Forecast, ResolvedRun
from paceline.training.metrics import (
    FINISHED,
    INCIDENTS,
    RESTARTED,
    STARTED,
    EvaluationRow,
    EventRow,
    MetricsFile,
    MetricsRow,
    StepRow,
    run_metrics,
)
from paceline.training.run_directory import METRICS, RECORD


class Observer(abc.ABC):
    """Receives the rows of a run."""

    @abc.abstractmethod
    def log(self, row: MetricsRow) -> None:
        """Receives a row."""

    def close(self) -> None:  # noqa: B027  (Most observers have nothing to finish.)
        """Finishes: there will be no more rows, regardless of how the run ended."""


class FileObserver(Observer):
    """Appends every row to the run's metrics file."""

    def __init__(self, metrics: MetricsFile) -> None:
        self._metrics = metrics

    def log(self, row: MetricsRow) -> None:
        """Writes a row; a start event first drops the rows after the state that it resumes from."""
        if isinstance(row, EventRow) and row.name == STARTED:
            self._go_back(row.step)
        self._metrics.append(row)

    def _go_back(self, step: int) -> None:
        """Drops later rows except incidents, whose messages contain their own step."""
        later = [
            msgspec.structs.replace(row, step=step)
            for row in (self._metrics.read() if self._metrics.path.exists() else ())
            if isinstance(row, EventRow) and row.name in INCIDENTS and row.step > step
        ]
        self._metrics.keep_up_to(step)
        for incident in later:
            self._metrics.append(incident)


class LogObserver(Observer):
    """Prints a line every few steps, and every evaluation and event."""

    def __init__(
        self,
        every_steps: int,
        expected: Forecast,
        write: Callable[[str], object] = sys.stderr.write,
    ) -> None:
        self._every_steps = every_steps
        self._expected = expected
        self._write = write
        self._recent: list[StepRow] = []

    def log(self, row: MetricsRow) -> None:
        """Prints a row if it is due."""
        if isinstance(row, EventRow):
            self._write(f"paceline: {row.name} {row.message}\n")
        elif isinstance(row, EvaluationRow):
            self._write(
                f"step {row.step:,}  held-out loss {row.loss:.4f}, {row.bits_per_byte:.4f} bits "
                "per byte\n"
            )
            if row.sample is not None:
                self._write(f"step {row.step:,}  sample: {row.sample!r}\n")
        else:
            self._recent.append(row)
            if row.step % self._every_steps == 0 or row.step == self._expected.num_steps:
                self._write(self._line())
                self._recent.clear()

    def _line(self) -> str:
        """Returns a line with means since the last line: a single loss is mostly noise."""
        last, number = self._recent[-1], len(self._recent)
        loss = sum(row.loss for row in self._recent) / number
        step_time_s = sum(row.step_time_s for row in self._recent) / number
        num_steps, known = self._expected.num_steps, self._expected.step_time
        left_s = (num_steps - last.step) * step_time_s
        predicted = "" if known is None else f" (predicted {format_seconds(known.value)})"
        return (
            f"step {last.step:,} of {num_steps:,}  loss {loss:.4f}  norm "
            f"{last.gradient_norm:.3g}  lr {last.learning_rate:.3g}  "
            f"{format_decimal(self._expected.tokens_per_s(step_time_s), 'tokens/s')}  step "
            f"{format_seconds(step_time_s)}{predicted}  left {format_duration(left_s)}\n"
        )


class Observers(Observer):
    """Several observers, none of which can end the run."""

    def __init__(
        self, observers: Sequence[Observer], warn: Callable[[str], object] | None = None
    ) -> None:
        self._observers = list(observers)
        self._warn = warn or _say

    def log(self, row: MetricsRow) -> None:
        """Passes a row to all observers that have not failed."""
        self._tell(f"at step {row.step}", lambda observer: observer.log(row))

    def close(self) -> None:
        """Closes all observers that have not failed."""
        self._tell("at the end", lambda observer: observer.close())
        self._observers.clear()

    def _tell(self, when: str, tell: Callable[[Observer], None]) -> None:
        for observer in tuple(self._observers):
            try:
                tell(observer)
            except Exception as error:
                self._observers.remove(observer)
                reason = " ".join(str(error).split()) or type(error).__name__
                self._warn(
                    f"paceline: {type(observer).__name__} failed {when} and gets no more metrics; "
                    f"training continues: {reason}\n"
                )


def _say(line: str) -> None:
    """Writes to the current sys.stderr, which a panel may have replaced."""
    sys.stderr.write(line)


class RestartLogger(Observer):
    """Forwards rows, and adds an event per restart before the first step that follows."""

    def __init__(self, observer: Observer, restarts: Sequence[Restart], joined_s: float) -> None:
        self._observer = observer
        self._restarts = list(restarts)
        self._joined_s = self._loaded_s = joined_s
        self._step = 0

    def log(self, row: MetricsRow) -> None:
        """Forwards a row."""
        if isinstance(row, EventRow) and row.name == STARTED:
            self._loaded_s = time.monotonic()
            self._step = row.step
        elif isinstance(row, StepRow) and self._restarts:
            for restart in self._restarts:
                self._observer.log(self._event(restart, is_last=restart is self._restarts[-1]))
            self._restarts.clear()
        self._observer.log(row)

    def close(self) -> None:
        """Closes the observer; a restart that no step followed is reported by a later attempt."""
        self._observer.close()

    def _event(self, restart: Restart, *, is_last: bool) -> EventRow:
        failure = restart.failure
        details: dict[str, float | int | str] = {
            "restart": restart.number,
            "rank": failure.rank,
            "exit_code": failure.exit_code,
            "phase": failure.phase,
            "failed_after_step": failure.step,
            "silent_s": restart.silent_s,
            "noticed_s": restart.noticed_s,
            "wait_s": restart.started_s - restart.noticed_s,
        }
        now = time.monotonic()
        if is_last:
            details |= {
                "rendezvous_s": self._joined_s - restart.started_s,
                "load_s": self._loaded_s - self._joined_s,
                "first_step_s": now - self._loaded_s,
            }
        return EventRow(
            step=self._step,
            name=RESTARTED,
            message=f"from step {self._step:,}: {failure}",
            time_s=now - restart.noticed_s if is_last else None,
            details=details,
        )


class RecordObserver(Observer):
    """Appends the record of a run when it finishes, which compares like any measurement."""

    def __init__(self, run: ResolvedRun, session: Session, expected: Forecast) -> None:
        self._run = run
        self._session = session
        self._expected = expected

    def log(self, row: MetricsRow) -> None:
        """Writes the record from the rows of all attempts when the last step is done."""
        if not isinstance(row, EventRow) or row.name != FINISHED:
            return
        directory = pathlib.Path(self._run.config.out)
        rows = list(MetricsFile(directory / METRICS).read())
        RecordStore(directory / RECORD).append(
            Record(
                kind="training_run",
                case=run_case(self._run, self._session),
                environment=capture_environment(),
                metrics=run_metrics(rows, self._expected),
                outcome="ok",
            )
        )


def run_case(run: ResolvedRun, session: Session) -> dict[str, CaseValue]:
    """Returns every setting that affects the expected speed and loss of a run."""
    config, location = run.config, describe_hardware(session.device)
    strategy = config.parallel.strategy_on(config.parallel.site_ranks(session.world_size))
    layout = describe(run.layout) if needs_mesh(run.layout) else None
    if config.parallel.outer.sites > 1:
        settings = config.parallel.outer.settings(config.training.steps)
        layout = f"{config.parallel.outer.sites} sites, {settings}"
    return {
        "strategy": strategy,
        "bucket_size_mb": config.parallel.bucket_size_for(strategy),
        **_model_case(config, location.device),
        "precision": config.training.precision,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "compile": "blocks" if config.model.compile_blocks else "none",
        "activation_checkpointing": config.model.activation_checkpointing,
        "optimizer": config.optimizer.name,
        "world_size": session.world_size,
        "num_hosts": session.placement.num_hosts,
        "backend": session.backend,
        **location.as_case(),
        "layout": layout,
        "steps": config.training.steps,
        "batch_size": config.training.batch_size,
        "learning_rate": config.optimizer.learning_rate,
        "schedule": config.schedule.name,
        "seed": config.training.seed,
    }


def _model_case(config: RunConfig, device: str) -> dict[str, CaseValue]:
    """Returns the case fields of the model; the dimensions of a Hugging Face model are None."""
    batch = BatchShape(
        num_sequences=config.training.micro_batch_size, context_length=config.data.context_length
    )
    if (foreign := config.model.hugging_face) is not None:
        return {
            **dict.fromkeys(MODEL_FIELDS, None),
            "model": pathlib.Path(foreign).name,
            "batch": batch.num_sequences,
            "context": batch.context_length,
            "attention": "transformers",
        }
    shape, preset = config.model.shape, config.model.preset
    name = preset if shape == model_preset(preset) else "custom"
    return {
        **model_case_fields(name, shape, batch),
        "attention": resolve_implementation("auto", device),
    }
