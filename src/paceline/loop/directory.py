"""A loop on disk: the decisions of each stage, so that the same command can resume the loop.

    loop.json                the budget and the limits of the runs
    calibration-sweep.jsonl  calibration of this machine on the models of the sweep
    sweep/                   the small runs, see `paceline.loop.sweep_directory`
    sweep.json               predictions for the sweep's runs, paired with measurements
    model.json               the model chosen by the fit, and its predicted loss
    calibration-run.jsonl    calibration of this machine on the chosen model
    pilot-1/, pilot-2/       a few steps of it on one rank and on two
    layout.json              ranks and strategy, and the predicted duration of the run
    run/                     the final run: the output of `paceline train`
    outcome.json             predictions for the final run, paired with measurements
    loop.html                the report

A stage whose file exists is skipped. Files are written atomically.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import TypeVar

import msgspec

from paceline.core.errors import PacelineError, UsageError
from paceline.core.finding import Finding
from paceline.core.plan import Estimate
from paceline.core.strategies import StrategyName
from paceline.data.storage import LocalStorage
from paceline.loop.sweep_design import COST_OF_LARGEST, Limits, PlannedRun, SweepSpec
from paceline.loop.sweep_directory import SweepDirectory, read_json
from paceline.predict.history import HistoryEntry

_SPEC = "loop.json"
_SWEEP = "sweep"
SWEEP_ENTRIES = "sweep.json"
_RUN = "run"
MODEL = "model.json"
LAYOUT = "layout.json"
OUTCOME = "outcome.json"
PAGE = "loop.html"

_Decided = TypeVar("_Decided")


class LoopSpec(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The budget of the loop, and the limits of its runs."""

    budget: float
    """FLOPs of the final run."""
    exploration: float
    """FLOPs of the sweep, as a fraction of the budget."""

    @property
    def sweep(self) -> SweepSpec:
        """The sweep that finds the best model for the budget."""
        return SweepSpec(
            target=self.budget,
            largest=self.exploration * self.budget / COST_OF_LARGEST,
            **{name: getattr(self, name) for name in Limits.__struct_fields__},
        )


class RuleOfThumb(msgspec.Struct, frozen=True, kw_only=True):
    """The model with 20 tokens per parameter, evaluated on the same surface."""

    parameters: float
    loss: float
    wasted: float
    """Share of the budget that the best model would save at the same loss."""


class ChosenModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model to train with the budget, according to the sweep."""

    run: PlannedRun
    """The buildable model, with its steps, batch and learning rate."""
    parameters: Estimate
    """The best N according to the fit."""
    loss: Estimate
    """Predicted held-out loss at the end of the run."""
    noise: float
    """Relative standard deviation of single runs from the surface."""
    reason: str
    """Method chosen by `paceline scaling fit` for the same runs, with its held-out error."""
    extrapolation: float
    """The budget divided by the FLOPs of the largest run of the sweep."""
    findings: tuple[Finding, ...]
    """Findings about the fit and about the check of the learning rate."""
    rule_of_thumb: RuleOfThumb


class LoopStoppedError(PacelineError):
    """The loop stopped before its last stage, because it cannot or should not continue."""


class PilotRun(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of a few steps of the final run."""

    step_time_s: float
    memory_bytes: float
    """Peak memory of the rank's process that uses most."""


class LayoutCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A number of ranks and a strategy for this machine."""

    ranks: int
    strategy: StrategyName
    step_time_s: float
    """Predicted by the formulas from the calibration."""
    memory_bytes: int
    """Tensor memory of the rank that uses most."""
    pilot: PilotRun | None = None
    """Pilot run; None if the formulas predict a faster strategy on the same ranks."""


class ChosenLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen layout, with predictions for the run."""

    candidates: tuple[LayoutCandidate, ...]
    """Candidates, first by pilot step time, then those without a pilot; the first is used."""
    hardware: str
    threads: int
    """Threads per rank."""
    step_time_s: Estimate
    memory_bytes: Estimate
    """Memory of one rank's process."""
    duration_s: Estimate
    """Duration of the whole run, including start-up and evaluations."""

    @property
    def chosen(self) -> LayoutCandidate:
        """The fastest candidate."""
        return self.candidates[0]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a finished loop."""

    entries: tuple[HistoryEntry, ...]
    """Predictions for the final run, paired with measurements."""
    sweep_flops: float
    sweep_time_s: float
    """Total time of all runs of the sweep."""
    run_flops: float


@dataclasses.dataclass(frozen=True)
class LoopDirectory:
    """A loop in a directory at `path`."""

    path: pathlib.Path

    @property
    def exists(self) -> bool:
        """Whether the directory contains a loop."""
        return self.has(_SPEC)

    def begin(self, spec: LoopSpec) -> LoopSpec:
        """Starts a loop, or resumes an existing one, which must have the same settings.

        A loop that an earlier version began has no ladder, and goes on without one.
        """
        known = self.once(_SPEC, LoopSpec, lambda: spec)
        if known.ladder is None:
            spec = msgspec.structs.replace(spec, ladder=None)
        if known != spec:
            raise UsageError(
                f"{self.path} holds a loop with other settings; name another directory with --out"
            )
        return known

    def pilot(self, ranks: int) -> pathlib.Path:
        """Returns the directory of the pilot run on `ranks` ranks."""
        return self.path / f"pilot-{ranks}"

    def calibration(self, stage: str) -> pathlib.Path:
        """Returns the path of the calibration records for a stage."""
        return self.path / f"calibration-{stage}.jsonl"

    @property
    def sweep(self) -> SweepDirectory:
        """The small runs."""
        return SweepDirectory(self.path / _SWEEP)

    @property
    def run(self) -> pathlib.Path:
        """The directory of the final run."""
        return self.path / _RUN

    def spec(self) -> LoopSpec:
        """Returns the settings that the loop began with."""
        return self._read(_SPEC, LoopSpec)

    def model(self) -> ChosenModel | None:
        """Returns the chosen model; None before it is chosen."""
        return self._read(MODEL, ChosenModel) if self.has(MODEL) else None

    def layout(self) -> ChosenLayout | None:
        """Returns the chosen layout; None before it is chosen."""
        return self._read(LAYOUT, ChosenLayout) if self.has(LAYOUT) else None

    def outcome(self) -> Outcome | None:
        """Returns the outcome; None before the final run has ended."""
        return self._read(OUTCOME, Outcome) if self.has(OUTCOME) else None

    def has(self, name: str) -> bool:
        """Returns whether the file of a stage exists."""
        return (self.path / name).exists()

    def once(self, name: str, kind: type[_Decided], make: Callable[[], _Decided]) -> _Decided:
        """Returns the stored decision of a stage; computes and stores it if missing."""
        if not self.has(name):
            self.write(name, msgspec.json.format(msgspec.json.encode(make())))
        return self._read(name, kind)

    def write(self, name: str, content: bytes) -> None:
        """Writes a file atomically."""
        LocalStorage(self.path).write(name, content)

    def _read(self, name: str, kind: type[_Decided]) -> _Decided:
        return read_json(self.path / name, kind, "not a file that a loop has written")
