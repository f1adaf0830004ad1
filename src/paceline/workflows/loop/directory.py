"""A loop on disk: what each stage has decided, so that the next command goes on from there.

    loop.json                the question
    calibration-sweep.jsonl  what this machine reaches on the models of the sweep
    sweep/                   the small runs, see `paceline.workflows.sweep.directory`
    sweep.json               what was predicted of each, beside what was measured
    model.json               the model that the fit has chosen, and its loss
    calibration-run.jsonl    what this machine reaches on that model
    pilot-1/, pilot-2/       a few steps of it on one rank and on two
    layout.json              ranks and strategy, and how long the run should take
    run/                     the run of that model: what `paceline train` writes
    outcome.json             every prediction of the run beside what was measured
    loop.html                all of it as one page

A stage whose file is there is not done again. Files are there whole or not at all.
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
from paceline.data.storage.local import LocalStorage
from paceline.prediction.history import HistoryEntry
from paceline.records.codecs import UNDECODABLE
from paceline.workflows.sweep.design import COST_OF_LARGEST, PlannedRun, Question
from paceline.workflows.sweep.directory import SweepDirectory

_QUESTION = "loop.json"
_SWEEP = "sweep"
SWEEP_ENTRIES = "sweep.json"
_RUN = "run"
MODEL = "model.json"
LAYOUT = "layout.json"
OUTCOME = "outcome.json"
PAGE = "loop.html"

_Decided = TypeVar("_Decided")


class LoopQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the loop is to train, and on what."""

    budget: float
    """FLOPs of the model that is trained in the end."""
    exploration: float
    """FLOPs of the sweep, as a share of the budget."""
    vocab_size: int
    context_length: int
    most_tokens: float
    """Tokens that a run may train on at most: the text, times the epochs that are allowed."""
    seed: int

    @property
    def sweep(self) -> Question:
        """What the sweep is to tell."""
        return Question(
            target=self.budget,
            largest=self.exploration * self.budget / COST_OF_LARGEST,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            most_tokens=self.most_tokens,
            seed=self.seed,
        )


class RuleOfThumb(msgspec.Struct, frozen=True, kw_only=True):
    """What 20 tokens per parameter would have come to, by the same surface."""

    parameters: float
    loss: float
    wasted: float
    """Share of the budget that the best model would not have needed for that loss."""


class ChosenModel(msgspec.Struct, frozen=True, kw_only=True):
    """What the sweep says is to be trained with the budget."""

    run: PlannedRun
    """The model, buildable, with its steps, batch and learning rate."""
    parameters: Estimate
    """The best N by the fit."""
    loss: Estimate
    """Held-out loss that the run should end with."""
    noise: float
    """Relative deviation of single runs from the surface."""
    reason: str
    """What the methods of `paceline scaling fit` make of the same runs, and how they held."""
    extrapolation: float
    """The budget over the largest run of the sweep."""
    findings: tuple[Finding, ...]
    """What is doubtful about the fit, and what the check of the learning rate said."""
    rule_of_thumb: RuleOfThumb


class LoopStoppedError(PacelineError):
    """A loop that ends before its last stage, because it cannot carry on or should not."""


class PilotRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a few steps of the final run took."""

    step_time_s: float
    memory_bytes: float
    """Of the process of the rank that holds most."""


class LayoutCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A way to run the model on this machine."""

    ranks: int
    strategy: StrategyName
    step_time_s: float
    """By the formulas, from the calibration."""
    memory_bytes: int
    """Of the tensors of the rank that holds most."""
    pilot: PilotRun | None = None
    """A few steps of it; None of layouts that are slower by the formulas, or failed."""


class ChosenLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Where the model is trained, and what that should take."""

    candidates: tuple[LayoutCandidate, ...]
    """The fastest in its pilot run first, which is the one that is taken."""
    hardware: str
    threads: int
    """Of each rank."""
    step_time_s: Estimate
    memory_bytes: Estimate
    """Of one rank's process."""
    duration_s: Estimate
    """Of the whole run, its start and evaluations included."""

    @property
    def chosen(self) -> LayoutCandidate:
        """The fastest one."""
        return self.candidates[0]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    entries: tuple[HistoryEntry, ...]
    """Every prediction of the final run, beside what was measured."""
    sweep_flops: float
    sweep_time_s: float
    """All runs of the sweep, one after the other."""
    run_flops: float


@dataclasses.dataclass(frozen=True)
class LoopDirectory:
    """A loop in a directory at `path`."""

    path: pathlib.Path

    def begin(self, question: LoopQuestion) -> None:
        """Begins a loop, or goes on with the one that is here, which must ask the same."""
        known = self.once(_QUESTION, LoopQuestion, lambda: question)
        if known != question:
            raise UsageError(
                f"{self.path} holds a loop with other settings; name another directory with --out"
            )

    def pilot(self, ranks: int) -> pathlib.Path:
        """Returns the directory of the first steps on so many ranks."""
        return self.path / f"pilot-{ranks}"

    def calibration(self, stage: str) -> pathlib.Path:
        """Returns the records of what this machine reaches, made before a stage."""
        return self.path / f"calibration-{stage}.jsonl"

    @property
    def sweep(self) -> SweepDirectory:
        """The small runs."""
        return SweepDirectory(self.path / _SWEEP)

    @property
    def run(self) -> pathlib.Path:
        """The run of the chosen model."""
        return self.path / _RUN

    def question(self) -> LoopQuestion:
        """Returns what was asked."""
        return self._read(_QUESTION, LoopQuestion)

    def model(self) -> ChosenModel | None:
        """Returns the model, once it is chosen."""
        return self._read(MODEL, ChosenModel) if self.has(MODEL) else None

    def layout(self) -> ChosenLayout | None:
        """Returns the layout, once it is chosen."""
        return self._read(LAYOUT, ChosenLayout) if self.has(LAYOUT) else None

    def outcome(self) -> Outcome | None:
        """Returns what came of it, once the run has ended."""
        return self._read(OUTCOME, Outcome) if self.has(OUTCOME) else None

    def has(self, name: str) -> bool:
        """Returns whether a stage has left its file."""
        return (self.path / name).exists()

    def once(self, name: str, kind: type[_Decided], make: Callable[[], _Decided]) -> _Decided:
        """Returns what a stage has decided; decides and writes it down if it has not."""
        if not self.has(name):
            self.write(name, msgspec.json.format(msgspec.json.encode(make())))
        return self._read(name, kind)

    def write(self, name: str, content: bytes) -> None:
        """Writes a file that is there whole or not at all."""
        LocalStorage(self.path).write(name, content)

    def _read(self, name: str, kind: type[_Decided]) -> _Decided:
        path = self.path / name
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except UNDECODABLE as error:
            raise UsageError(f"{path}: not a file that a loop has written: {error}") from error
