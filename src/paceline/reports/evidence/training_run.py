"""A run of the trainer, read from its directory."""

import dataclasses
import os
import pathlib
import typing

import msgspec

from paceline.core.errors import RecordError, UsageError
from paceline.records import Environment
from paceline.records.codecs import UNDECODABLE
from paceline.training.metrics.expectation import Expectation
from paceline.training.metrics.rows import (
    STARTED,
    EvaluationRow,
    EventRow,
    MetricsFile,
    MetricsRow,
    StepRow,
)
from paceline.training.run_files import CONFIG, ENVIRONMENT, EXPECTATION, METRICS


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """What a run has left behind so far."""

    name: str
    """Of its directory."""
    config: str
    """The resolved config, as TOML."""
    environment: Environment
    """Of its last attempt."""
    expected: Expectation
    """What was known beforehand."""
    rows: tuple[MetricsRow, ...]

    @property
    def steps(self) -> list[StepRow]:
        """Its steps."""
        return [row for row in self.rows if isinstance(row, StepRow)]

    @property
    def evaluations(self) -> list[EvaluationRow]:
        """What it was worth on held-out text."""
        return [row for row in self.rows if isinstance(row, EvaluationRow)]

    @property
    def events(self) -> list[EventRow]:
        """What happened to it."""
        return [row for row in self.rows if isinstance(row, EventRow)]

    @property
    def resumptions(self) -> list[int]:
        """The steps after which it was started again."""
        return [row.step for row in self.events if row.name == STARTED and row.step > 0]


def read_run(directory: str | os.PathLike[str]) -> TrainingRun:
    """Reads a run, which may be going on."""
    place = pathlib.Path(directory)
    missing = [
        name for name in (CONFIG, ENVIRONMENT, EXPECTATION, METRICS) if not (place / name).is_file()
    ]
    if missing:
        raise UsageError(
            f"{place}: not the directory of a run: no {', '.join(missing)}; name the directory "
            "that is `out` in its config"
        )
    return TrainingRun(
        name=place.resolve().name,
        config=(place / CONFIG).read_text(encoding="utf-8"),
        environment=_decoded(place / ENVIRONMENT, Environment),
        expected=_decoded(place / EXPECTATION, Expectation),
        rows=tuple(MetricsFile(place / METRICS).read()),
    )


_Decoded = typing.TypeVar("_Decoded")


def _decoded(path: pathlib.Path, kind: type[_Decoded]) -> _Decoded:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except UNDECODABLE as error:
        raise RecordError(f"{path}: not a valid file of a run: {error}") from error
