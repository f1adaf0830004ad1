"""A sweep on disk: its plan, and one directory per run.

    sweep.json      the settings and every planned run; written before a run begins
    base.toml       the config shared by all runs: data, precision, parallelism
    runs/NAME/      run.toml, log.txt, and the output of `paceline train`
    runs.jsonl      a row for every ended run of the fit, for `paceline scaling fit`
    checks.jsonl    a row for every ended run that varies the rule

A run has ended when its directory contains `ended.json`. If a sweep is killed, the same command
resumes it: planned runs are not planned again, ended ones are not repeated, and interrupted ones
resume from their newest checkpoint.

Predicts the duration of runs from those that have ended.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from paceline.core.errors import UsageError
from paceline.core.strategies import with_current_names
from paceline.core.units import one_line
from paceline.data.storage import LocalStorage
from paceline.loop.run_config import run_config
from paceline.loop.sweep_design import CHECKS, FIT, PlannedRun, SweepSpec
from paceline.records import Outcome, Record
from paceline.records.store import UNDECODABLE
from paceline.training.config import RunConfig
from paceline.training.run_directory import RECORD, last_record
from paceline.training.toml_config import encode_config, read_config

ROWS = "runs.jsonl"
_CHECKS = "checks.jsonl"
_STATE = "sweep.json"
_BASE = "base.toml"
_RUNS = "runs"
ENDED = "ended.json"
"""File in the directory of an ended run, with its outcome."""

_Read = TypeVar("_Read")


class RunResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The outcome of an ended run."""

    outcome: Outcome
    reason: str | None = None
    """Why the run has no loss; None if it has one."""
    time_s: float
    """Duration of the last attempt."""
    is_resumed: bool = False
    """Whether an earlier attempt trained some of the steps, which time_s does not include."""


class SweepState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The decisions of a sweep so far."""

    # Directories of earlier versions call it a question.
    spec: SweepSpec = msgspec.field(name="question")
    at_once: int | None = None
    """Number of concurrent runs on this machine; None before it is measured."""
    runs: tuple[PlannedRun, ...] = ()
    """Runs in the order of planning."""
    is_refined: bool = False
    """Whether the refining runs have been planned."""


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """An ended run, in the format of `paceline scaling fit`."""

    name: str
    parameters: float
    """N of the fit: a sixth of the FLOPs per token, so that 6ND equals the exact FLOPs."""
    num_parameters: int
    """Number of parameters of the model, embeddings included."""
    tokens: int
    num_steps: int
    flops: float
    learning_rate: float
    batch_tokens: int
    learning_rate_factor: float
    batch_factor: float
    seed: int
    outcome: Outcome
    reason: str | None
    final_loss: float | None
    """Held-out loss after the last step."""
    expected_loss: float | None
    expected_low: float | None
    expected_high: float | None
    step_time_s: float | None
    memory_bytes: float | None
    time_s: float
    """Duration of the last attempt."""
    is_resumed: bool = False
    """Whether an earlier attempt trained some of the steps."""


class SweepDirectory:
    """A sweep in a directory at `path`."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    @property
    def exists(self) -> bool:
        """Whether the directory contains a sweep."""
        return (self.path / _STATE).exists()

    def begin(self, spec: SweepSpec, base: RunConfig) -> SweepState:
        """Starts a sweep, or resumes an existing one, which must have the same settings.

        A sweep that an earlier version began has no ladder, and goes on without one: its later runs
        have to be comparable with those that have ended.
        """
        if self.exists:
            state = self.state()
            if state.spec.ladder is None:
                spec = msgspec.structs.replace(spec, ladder=None)
            if state.spec != spec:
                difference = _difference(state.spec, spec)
                raise UsageError(
                    f"{self.path} holds a sweep with other settings ({difference}); name another "
                    "directory with --out"
                )
            return state
        _write(self.path / _BASE, encode_config(_with_whole_paths(base)).encode())
        state = SweepState(spec=spec)
        self.keep(state)
        return state

    def base(self) -> RunConfig:
        """Returns the config shared by all runs."""
        return read_config(self.path / _BASE)

    def state(self) -> SweepState:
        """Returns the decisions so far."""
        return read_json(self.path / _STATE, SweepState, "not the state of a sweep")

    def keep(self, state: SweepState) -> None:
        """Replaces the state atomically."""
        _write(self.path / _STATE, msgspec.json.format(msgspec.json.encode(state)))

    def run_directory(self, run: PlannedRun) -> pathlib.Path:
        """Returns the directory of a run."""
        return self.path / _RUNS / run.name

    def run_config(self, run: PlannedRun) -> RunConfig:
        """Returns the config of a run, for the current location of the sweep."""
        return run_config(self.base(), run, self.run_directory(run).resolve())

    def result(self, run: PlannedRun) -> RunResult | None:
        """Returns the result of a run; None if it has not ended."""
        return read_result(self.run_directory(run))

    def open_runs(self, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
        """Returns the runs that have not ended."""
        return [run for run in runs if self.result(run) is None]

    def rows(self, *purposes: str) -> list[RunRow]:
        """Returns the rows of ended runs with the given purposes, in the order of planning."""
        rows = (self._row(run) for run in self.state().runs if run.purpose in purposes)
        return [row for row in rows if row is not None]

    def write_rows(self) -> None:
        """Writes the rows of ended runs for `paceline scaling fit`, and those of the checks."""
        for purposes, name in (((FIT,), ROWS), (CHECKS, _CHECKS)):
            lines = [msgspec.json.encode(row) + b"\n" for row in self.rows(*purposes)]
            _write(self.path / name, b"".join(lines))

    def _row(self, run: PlannedRun) -> RunRow | None:
        result = self.result(run)
        if result is None:
            return None
        record = self.record(run) if result.outcome == "ok" else None
        expected = run.expected_loss
        return RunRow(
            name=run.name,
            parameters=run.fitted_parameters,
            num_parameters=run.parameters,
            tokens=run.tokens,
            num_steps=run.steps,
            flops=run.flops,
            learning_rate=run.learning_rate,
            batch_tokens=run.tokens // run.steps,
            learning_rate_factor=run.learning_rate_factor,
            batch_factor=run.batch_factor,
            seed=run.seed,
            outcome=result.outcome,
            reason=result.reason,
            final_loss=_metric(record, "heldout_loss"),
            expected_loss=None if expected is None else expected.value,
            expected_low=None if expected is None else expected.low,
            expected_high=None if expected is None else expected.high,
            step_time_s=_metric(record, "step_time_s"),
            memory_bytes=_metric(record, "memory_bytes"),
            time_s=result.time_s,
            is_resumed=result.is_resumed,
        )

    def record(self, run: PlannedRun) -> Record | None:
        """Returns the record of a finished run, or None."""
        directory = self.run_directory(run)
        return last_record(directory) if (directory / RECORD).exists() else None


def _with_whole_paths(base: RunConfig) -> RunConfig:
    """Returns the config with absolute dataset paths, valid from any directory."""
    sources = tuple(
        source
        if "://" in source.place
        else dataclasses.replace(source, place=str(pathlib.Path(source.place).resolve()))
        for source in base.data.sources
    )
    return dataclasses.replace(base, data=dataclasses.replace(base.data, sources=sources))


def read_result(directory: pathlib.Path) -> RunResult | None:
    """Returns the result of the run in a directory; None if it has not ended."""
    try:
        return read_json(directory / ENDED, RunResult, "not the ending of a run")
    except FileNotFoundError:
        return None


def write_result(directory: pathlib.Path, result: RunResult) -> None:
    """Marks the run in a directory as ended."""
    _write(directory / ENDED, msgspec.json.encode(result))


def _metric(record: Record | None, name: str) -> float | None:
    metric = None if record is None else record.metrics.get(name)
    return None if metric is None else metric.value


def read_json(path: pathlib.Path, kind: type[_Read], otherwise: str) -> _Read:
    """Returns the content of a file; the error for another content says `otherwise`."""
    try:
        return msgspec.json.decode(with_current_names(path.read_bytes()), type=kind)
    except UNDECODABLE as error:
        raise UsageError(f"{path}: {otherwise}: {one_line(error)}") from error


def _write(path: pathlib.Path, content: bytes) -> None:
    """Writes a file atomically."""
    LocalStorage(path.parent).write(path.name, content)


def _difference(here: SweepSpec, asked: SweepSpec) -> str:
    """Names the first setting in which two sweeps differ."""
    old, new = (_settings(msgspec.to_builtins(spec)) for spec in (here, asked))
    for name in [*old, *new]:
        if old.get(name) != new.get(name):
            return f"{name} {_written(old.get(name))} there, {_written(new.get(name))} here"
    return "the same"


def _settings(nested: dict[str, Any]) -> dict[str, Any]:
    """Returns settings by name, those of the ladder included."""
    settings: dict[str, Any] = {}
    for name, value in nested.items():
        settings |= _settings(value) if isinstance(value, dict) else {name: value}
    return settings


def _written(value: float | str | None) -> str:
    if value is None:
        return "unlimited"
    return value if isinstance(value, str) else f"{value:g}"


def expected_time_s(run: PlannedRun, rows: Sequence[RunRow]) -> float | None:
    """Returns the expected duration of a run from uninterrupted runs; None from fewer than two.

    The model is a start-up time plus seconds per FLOP. Small models reach fewer FLOP/s, so runs are
    weighted by their similarity in size.
    """
    ended = [row for row in rows if row.outcome == "ok" and not row.is_resumed]
    if len(ended) < 2:
        return None
    flops = np.array([row.flops for row in ended])
    seconds = np.array([row.time_s for row in ended])
    distance = np.log([row.num_parameters / run.parameters for row in ended])
    weights = 1 / (1 + distance**2)
    columns = np.stack([np.ones_like(flops), flops / flops.max()])
    # Minimise relative errors, so that long runs do not dominate short ones.
    scale = np.sqrt(weights) / seconds
    start, slope = np.linalg.lstsq((columns * scale).T, seconds * scale, rcond=None)[0]
    return max(float(start + slope * run.flops / flops.max()), float(seconds.min()))
