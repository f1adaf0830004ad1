"""TensorBoard: `tensorboard --logdir RUN/tensorboard`."""

import pathlib
from typing import TYPE_CHECKING

from paceline.training.config import RunConfig
from paceline.training.metrics.expectation import Expectation
from paceline.training.metrics.rows import STARTED, EvaluationRow, EventRow, MetricsRow
from paceline.training.metrics.sinks.values import row_values
from paceline.training.toml_config import encode_config

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_FLUSH_S = 10


class TensorBoardSink:
    """Writes event files.

    Args:
        config: The run.
        directory: Directory of the run.
        expected: Predictions and limits of the run.
    """

    def __init__(self, config: RunConfig, directory: pathlib.Path, expected: Expectation) -> None:
        self._config = config
        self._directory = directory / "tensorboard"
        self._expected = expected
        self._writer: SummaryWriter | None = None

    def note(self, row: MetricsRow) -> None:
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
        writer = SummaryWriter(str(self._directory), purge_step=step + 1, flush_secs=_FLUSH_S)
        self._writer = writer
        return writer
