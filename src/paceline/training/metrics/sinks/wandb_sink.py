"""Weights & Biases: offline unless WANDB_MODE says otherwise; `wandb sync` uploads it later."""

import os
import pathlib
import uuid
from typing import Any

from paceline.training.config import RunConfig
from paceline.training.metrics.expectation import Expectation
from paceline.training.metrics.rows import FINISHED, EventRow, MetricsRow
from paceline.training.metrics.sinks.values import config_values, row_values

_PROJECT = "paceline"


class WandbSink:
    """Logs to a W&B run, which is reused after every resume.

    Args:
        config: The run.
        directory: Directory of the run.
        expected: Predictions and limits of the run.
    """

    def __init__(self, config: RunConfig, directory: pathlib.Path, expected: Expectation) -> None:
        self._config = config
        self._directory = directory
        self._expected = expected
        self._run: Any = None
        self._exit_code = 1

    def note(self, row: MetricsRow) -> None:
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
            config=config_values(self._config),
            settings=wandb.Settings(silent=True, console="off"),
        )
        run.define_metric("*", step_metric="step")
        return run
