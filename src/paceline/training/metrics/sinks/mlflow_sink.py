"""MLflow: a database file in the run's directory unless MLFLOW_TRACKING_URI names a server.

SQLite, because MLflow rejects its older store of plain files since version 3.13.
"""

import logging
import os
import pathlib
import time
from typing import TYPE_CHECKING, Any

from paceline.training.config import RunConfig
from paceline.training.metrics.expectation import Expectation
from paceline.training.metrics.rows import FINISHED, EventRow, MetricsRow
from paceline.training.metrics.sinks.values import config_values, row_values

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_EXPERIMENT = "paceline"
_DATABASE = "mlflow.db"
_MOST_METRICS = 500
"""Maximum number of metrics per request, below the limit of servers."""


class MlflowSink:
    """Logs to an MLflow run, which is reused after every resume.

    Rows are sent in batches, every few steps: each batch is a transaction or a request.

    Args:
        config: The run.
        directory: Directory of the run.
        expected: Predictions and limits of the run.
    """

    def __init__(self, config: RunConfig, directory: pathlib.Path, expected: Expectation) -> None:
        self._config = config
        self._directory = directory / "mlflow"
        self._expected = expected
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._status = "KILLED"
        self._waiting: list[Any] = []

    def note(self, row: MetricsRow) -> None:
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
        place = os.environ.get("MLFLOW_TRACKING_URI", "")
        self._client = client = MlflowClient(tracking_uri=place or self._own_place())
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
            artifacts = None if place else self._directory.resolve().as_uri()
            number = client.create_experiment(_EXPERIMENT, artifact_location=artifacts)
        run = client.create_run(number, run_name=self._directory.resolve().parent.name)
        self._run_id = run.info.run_id
        parameters = [
            Param(name, str(value)) for name, value in _flat(config_values(self._config)).items()
        ]
        client.log_batch(self._run_id, params=parameters)
        known.write_text(self._run_id, encoding="utf-8")

    def _own_place(self) -> str:
        return f"sqlite:///{self._directory.resolve() / _DATABASE}"


def _flat(values: dict[str, Any], section: str = "") -> dict[str, Any]:
    """Returns nested values under dotted names such as training.steps."""
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{section}{name}."))
        else:
            flat[section + name] = value
    return flat
