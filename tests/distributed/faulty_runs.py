"""Training runs with faults injected on one rank, at a step chosen by the test."""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Literal
from unittest import mock

import torch
from safetensors.torch import load_file

from paceline.data.loader.torch_batches import TorchBatch, TorchLoader
from paceline.health.errors import AgreedError
from paceline.training.config import RunConfig
from paceline.training.forecast import layout_of
from paceline.training.loop import RunOutcome, train
from paceline.training.metrics import EventRow, MetricsFile, MetricsRow, StepRow
from paceline.training.observers import FileObserver
from paceline.training.parallelize import TrainState, build
from paceline.training.run_checkpointer import RunCheckpointer
from tests import devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class BitFlip:
    """A bit to flip on one rank after a step."""

    rank: int
    step: int
    where: Literal["weights", "state"] = "weights"
    tensor: int = 0
    """Index among the rank's tensors, modulo their number."""
    bit: int = 0
    """Index among the tensor's bits, modulo their number."""


def flip_bit(train_state: TrainState, flip: BitFlip) -> str:
    """Flips the bit on this rank and returns the tensor's name."""
    tensors = [
        each
        for each in train_state.tensors()
        if (" of " in each.name) == (flip.where == "state") and each.values.numel()
    ]
    chosen = tensors[flip.tensor % len(tensors)]
    content = chosen.values.detach().view(-1).view(torch.uint8)
    bit = flip.bit % (8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    return chosen.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Poison:
    """A fault in some forward passes of one rank. Passes count from 1; a step is one pass."""

    rank: int
    passes: tuple[int, ...]
    kind: Literal["nan", "infinite", "spike", "slow"] = "nan"
    """NaN gradients, infinite outputs, a loss that is far too high, or a slow pass."""
    seconds: float = 0.0


class PoisonHook:
    """Applies poisons, as a forward hook of the model."""

    def __init__(self, poisons: Sequence[Poison]) -> None:
        self._poisons = poisons
        self._num_passes = 0

    def __call__(self, _model: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        self._num_passes += 1
        for poison in self._poisons:
            if self._num_passes not in poison.passes:
                continue
            if poison.kind == "nan":
                output.register_hook(lambda gradient: gradient * torch.nan)
            elif poison.kind == "infinite":
                output = output * torch.inf
            elif poison.kind == "spike":
                output = output * 1000
            else:
                time.sleep(poison.seconds)
        return output


class AfterSteps:
    """Writes rank 0's rows, and runs each action once on this rank after its step."""

    def __init__(
        self, metrics: FileObserver | None, actions: dict[int, Callable[[], object]]
    ) -> None:
        self._metrics = metrics
        self._actions = actions

    def log(self, row: MetricsRow) -> None:
        if self._metrics is not None:
            self._metrics.log(row)
        if isinstance(row, StepRow) and row.step in self._actions:
            self._actions.pop(row.step)()

    def close(self) -> None:
        """Does nothing: there is nothing to close."""


def train_faulty(
    rank: int,
    world_size: int,
    config: RunConfig,
    flips: tuple[BitFlip, ...] = (),
    poisons: tuple[Poison, ...] = (),
    left_out: tuple[int, ...] = (),
) -> RunOutcome | str:
    """Trains on this rank with bit flips and poisoned passes, and leaves out some batches.

    Returns the outcome, or the message of the error with which all ranks agreed to stop. Returning
    it keeps the pool's ranks alive, which saves the seconds that starting others takes.
    """
    session = devices.session_of(rank, world_size)
    out = pathlib.Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    metrics = FileObserver(MetricsFile(out / "metrics.jsonl")) if rank == 0 else None
    train_state = build(config, layout_of(config, session.world_size), session)
    own = {f.step: (lambda f=f: flip_bit(train_state, f)) for f in flips if f.rank == rank}
    train_state.module.register_forward_hook(PoisonHook([p for p in poisons if p.rank == rank]))
    checkpointer = RunCheckpointer(config, session)
    try:
        with mock.patch.object(TorchLoader, "__next__", _leaving_out(left_out)):
            observer = AfterSteps(metrics, own)
            return train(config, session, train_state, checkpointer, observer, lambda: False)
    except AgreedError as error:
        return str(error)


def _leaving_out(numbers: tuple[int, ...]) -> Callable[[TorchLoader], TorchBatch]:
    """Returns a `__next__` for loaders that skips batches by number, counted from 1."""
    take = TorchLoader.__next__

    def following(loader: TorchLoader) -> TorchBatch:
        batch = take(loader)
        while batch.step + 1 in numbers:
            batch = take(loader)
        return batch

    return following


def events_of(config: RunConfig, name: str) -> list[EventRow]:
    rows = MetricsFile(pathlib.Path(config.out) / "metrics.jsonl").read()
    return [row for row in rows if isinstance(row, EventRow) and row.name == name]


def saved_tensors(config: RunConfig, step: int) -> dict[str, torch.Tensor]:
    """Returns all tensors of a checkpoint, from the files of all ranks."""
    place = pathlib.Path(config.out) / "checkpoints" / f"step-{step:08}"
    files = sorted(place.glob("*.safetensors"))
    return {name: values for file in files for name, values in load_file(file).items()}
