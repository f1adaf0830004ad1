"""Experiment trackers that also receive a run's metrics; each is an extra of the package.

Nothing leaves the machine unless the user says so in the tracker's own environment variables.
"""

import importlib.util
import logging
import os
import pathlib
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.core.errors import UsageError
from paceline.training.config import RunConfig, SinkName
from paceline.training.forecast import Forecast
from paceline.training.metrics import (
    FINISHED,
    STARTED,
    EvaluationRow,
    EventRow,
    MetricsRow,
    StepRow,
)
from paceline.training.observers import Observer
from paceline.training.toml_config import encode_config

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient
    from torch.utils.tensorboard import SummaryWriter


def require_sinks(names: Sequence[SinkName]) -> None:
    """Raises unless the package of every tracker is installed."""
    for name in names:
        found = importlib.util.find_spec(name)
        # A directory of that name, such as W&B creates, looks like a package without an origin.
        if found is None or found.origin is None:
            raise UsageError(
                f"logging.sinks has {name}, which is not installed; `pip install "
                f"'paceline[{name}]'`, or remove it"
            )


def make_sinks(config: RunConfig, directory: pathlib.Path, expected: Forecast) -> list[Observer]:
    """Creates the trackers of a run; each opens at its first row."""
    return [_SINKS[name](config, directory, expected) for name in config.logging.sinks]


def row_values(row: MetricsRow, expected: Forecast) -> dict[str, float]:
    """Returns the values of a row by name; an event has none."""
    values: dict[str, float | None] = {}
    predicted = expected.step_time
    if isinstance(row, StepRow):
        values = {
            "train/loss": row.loss,
            "train/gradient_norm": row.gradient_norm,
            "train/learning_rate": row.learning_rate,
            "train/tokens": row.tokens,
            "time/step_s": row.step_time_s,
            "time/predicted_step_s": None if predicted is None else predicted.value,
            "time/data_wait_s": row.data_wait_s,
            "time/exposed_communication_s": row.exposed_communication_s,
            "speed/tokens_per_s": expected.tokens_per_s(row.step_time_s),
            "speed/model_flops_utilization": expected.utilization(row.step_time_s),
            "memory/bytes": row.memory_bytes,
        }
    elif isinstance(row, EvaluationRow):
        values = {
            "heldout/loss": row.loss,
            "heldout/bits_per_byte": row.bits_per_byte,
            "time/evaluation_s": row.time_s,
        }
    return {name: float(value) for name, value in values.items() if value is not None}


class _Sink(Observer):
    """A tracker of a run, which opens at its first row."""

    def __init__(self, config: RunConfig, directory: pathlib.Path, expected: Forecast) -> None:
        self._config = config
        self._directory = directory
        self._expected = expected


_FLUSH_S = 10


class TensorBoardSink(_Sink):
    """Writes event files, for `tensorboard --logdir RUN/tensorboard`."""

    _writer: "SummaryWriter | None" = None

    def log(self, row: MetricsRow) -> None:
        """Writes a row."""
        writer = self._writer or self._open(row.step)
        for name, value in row_values(row, self._expected).items():
            writer.add_scalar(name, value, row.step)
        if isinstance(row, EventRow):
            writer.add_text("event", f"{row.name} {row.message}", row.step)
            if row.name == STARTED:
                writer.add_text("config", f"```toml\n{encode_config(self._config)}```", row.step)
        elif isinstance(row, EvaluationRow) and row.sample is not None:
            writer.add_text("sample", row.sample, row.step)

    def close(self) -> None:
        """Flushes and closes the event file."""
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter

        # Hides later steps that an earlier attempt wrote.
        self._writer = SummaryWriter(
            str(self._directory / "tensorboard"), purge_step=step + 1, flush_secs=_FLUSH_S
        )
        return self._writer


_PROJECT = "paceline"


class WandbSink(_Sink):
    """Logs to a W&B run, which is reused after every resume.

    Offline unless WANDB_MODE says otherwise; `wandb sync` uploads it later.
    """

    _run: Any = None
    _exit_code = 1

    def log(self, row: MetricsRow) -> None:
        """Logs the values of a row."""
        if self._run is None:
            self._run = self._open()
        if isinstance(row, EventRow) and row.name == FINISHED:
            self._exit_code = 0
        if values := row_values(row, self._expected):
            # The step is an ordinary value, because W&B's own counter cannot go back, and a resumed
            # run does.
            self._run.log({"step": row.step, **values})

    def close(self) -> None:
        """Ends the run and waits until everything is written."""
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)

    def _open(self) -> Any:
        import wandb

        place = self._directory / "wandb"
        place.mkdir(parents=True, exist_ok=True)
        name = place / "run-id"
        if not name.exists():
            name.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
        run = wandb.init(
            dir=str(self._directory),
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=self._directory.resolve().name,
            id=name.read_text(encoding="utf-8"),
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=msgspec.to_builtins(self._config),
            settings=wandb.Settings(silent=True, console="off"),
        )
        run.define_metric("*", step_metric="step")
        return run


_EXPERIMENT = "paceline"
_DATABASE = "mlflow.db"
_MOST_METRICS = 500
"""Maximum number of metrics per request, below the limit of servers."""


class MlflowSink(_Sink):
    """Logs to an MLflow run, which is reused after every resume.

    Its store is a database file in the run's directory unless MLFLOW_TRACKING_URI names a server;
    MLflow rejects its older store of plain files since version 3.13. Rows are sent in batches,
    every few steps: each batch is a transaction or a request.
    """

    _client: "MlflowClient | None" = None
    _run_id = ""
    _status = "KILLED"

    def __init__(self, config: RunConfig, directory: pathlib.Path, expected: Forecast) -> None:
        super().__init__(config, directory / "mlflow", expected)
        self._waiting: list[Any] = []

    def log(self, row: MetricsRow) -> None:
        """Buffers the values of a row, and sends the buffer if it is due."""
        from mlflow.entities import Metric

        if self._client is None:
            self._open()
        now_ms = int(time.time() * 1e3)
        for name, value in row_values(row, self._expected).items():
            self._waiting.append(Metric(name, value, now_ms, row.step))
        if isinstance(row, EventRow) and row.name == FINISHED:
            self._status = "FINISHED"
        is_due = row.step % self._config.logging.every_steps == 0 or isinstance(row, EventRow)
        if is_due or len(self._waiting) > _MOST_METRICS:
            self._send()

    def close(self) -> None:
        """Sends the buffer and ends the run."""
        if self._client is not None:
            self._send()
            self._client.set_terminated(self._run_id, status=self._status)

    def _send(self) -> None:
        assert self._client is not None
        while self._waiting:
            part, self._waiting = self._waiting[:_MOST_METRICS], self._waiting[_MOST_METRICS:]
            self._client.log_batch(self._run_id, metrics=part)

    def _open(self) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # It logs every table it creates.
        self._directory.mkdir(parents=True, exist_ok=True)
        server = os.environ.get("MLFLOW_TRACKING_URI", "")
        own = f"sqlite:///{self._directory.resolve() / _DATABASE}"
        self._client = client = MlflowClient(tracking_uri=server or own)
        known = self._directory / "run-id"
        if known.exists():
            self._run_id = known.read_text(encoding="utf-8")
            client.update_run(self._run_id, status="RUNNING")
            return
        experiment = client.get_experiment_by_name(_EXPERIMENT)
        if experiment is not None:
            number = experiment.experiment_id
        else:
            # A server has its own artifact location; the default for a file is another directory.
            artifacts = None if server else self._directory.resolve().as_uri()
            number = client.create_experiment(_EXPERIMENT, artifact_location=artifacts)
        run = client.create_run(number, run_name=self._directory.resolve().parent.name)
        self._run_id = run.info.run_id
        values = _flat(msgspec.to_builtins(self._config))
        parameters = [Param(name, str(value)) for name, value in values.items()]
        client.log_batch(self._run_id, params=parameters)
        known.write_text(self._run_id, encoding="utf-8")


def _flat(values: dict[str, Any], section: str = "") -> dict[str, Any]:
    """Returns nested values under dotted names such as training.steps."""
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{section}{name}."))
        else:
            flat[section + name] = value
    return flat


_SINKS: dict[SinkName, type[_Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
}
"""Class of each tracker; the key is both its package and the extra that installs it."""
