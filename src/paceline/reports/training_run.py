"""Reads a training run from its directory."""

import dataclasses
import os
import pathlib
import typing

import msgspec

from paceline.core.errors import RecordError, UsageError
from paceline.core.units import one_line
from paceline.records import Environment
from paceline.records.store import UNDECODABLE
from paceline.training.forecast import Forecast
from paceline.training.metrics import (
    STARTED,
    EvaluationRow,
    EventRow,
    MetricsFile,
    MetricsRow,
    StepRow,
)
from paceline.training.run_directory import CONFIG, ENVIRONMENT, EXPECTATION, METRICS


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """The files of a finished or running training run."""

    name: str
    """Name of the run directory."""
    config: str
    """The resolved config, as TOML."""
    environment: Environment
    """Environment of the last attempt."""
    expected: Forecast
    """Predictions and limits from before the first step."""
    rows: tuple[MetricsRow, ...]

    @property
    def steps(self) -> list[StepRow]:
        """The rows of steps."""
        return [row for row in self.rows if isinstance(row, StepRow)]

    @property
    def evaluations(self) -> list[EvaluationRow]:
        """The rows of evaluations on held-out text."""
        return [row for row in self.rows if isinstance(row, EvaluationRow)]

    @property
    def events(self) -> list[EventRow]:
        """The rows of events."""
        return [row for row in self.rows if isinstance(row, EventRow)]

    @property
    def resumptions(self) -> list[int]:
        """The steps after which the run was resumed."""
        return [row.step for row in self.events if row.name == STARTED and row.step > 0]


def read_run(directory: str | os.PathLike[str]) -> TrainingRun:
    """Reads a run, which may still be in progress.

    Raises UsageError if the directory lacks a file of a run.
    """
    path = pathlib.Path(directory)
    missing = [
        name for name in (CONFIG, ENVIRONMENT, EXPECTATION, METRICS) if not (path / name).is_file()
    ]
    if missing:
        raise UsageError(
            f"{path}: not the directory of a run: no {', '.join(missing)}; name the directory "
            "that is `out` in its config"
        )
    return TrainingRun(
        name=path.resolve().name,
        config=(path / CONFIG).read_text(encoding="utf-8"),
        environment=_decoded(path / ENVIRONMENT, Environment),
        expected=_decoded(path / EXPECTATION, Forecast),
        rows=tuple(MetricsFile(path / METRICS).read()),
    )


_Decoded = typing.TypeVar("_Decoded")


def _decoded(path: pathlib.Path, kind: type[_Decoded]) -> _Decoded:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except UNDECODABLE as error:
        raise RecordError(f"{path}: not a valid file of a run: {one_line(error)}") from error
