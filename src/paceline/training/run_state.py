"""All that a run consists of, saved and restored: weights, optimizers, place in the data, chance.

What is saved knows neither ranks nor strategies: any number and any strategy goes on from it.
"""

import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from paceline.core.errors import UsageError
from paceline.data.format.manifest import read_manifest
from paceline.data.storage import open_storage
from paceline.models.hugging_face.files import read_config
from paceline.parallel import Session
from paceline.training.build import Trainee
from paceline.training.checkpoint.agreement import from_first
from paceline.training.checkpoint.checkpointer import Checkpointer
from paceline.training.checkpoint.format.manifest import Json
from paceline.training.checkpoint.memory.tier import MemoryTier
from paceline.training.checkpoint.restore import Restored, Source, load_newest_valid
from paceline.training.checkpoint.state.identity import RunIdentity, identity_of
from paceline.training.checkpoint.state.random_numbers import (
    capture_random_state,
    restore_random_state,
)
from paceline.training.checkpoint.state.training import load_training_state, training_state
from paceline.training.config import RunConfig


class Position(Protocol):
    """Where a run is in its data."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the position."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a position."""


class RunStates:
    """Saves and restores the states of one run; all ranks make one and call it alike.

    Args:
        config: The run.
        session: This rank among the others.
        place: Where its checkpoints are.
        diverged: Where the state is kept that a run had before numbers were not finite.
    """

    def __init__(self, config: RunConfig, session: Session, place: str, diverged: str) -> None:
        self._config = config
        self._session = session
        self._place = place
        self._identity = _identity(config)
        self._diverged = diverged
        self._checkpointer = Checkpointer(
            place, keep=config.checkpoint.keep_last, asynchronous=config.checkpoint.asynchronous
        )
        self._memory: MemoryTier | None = None
        if config.checkpoint.memory_every_steps:
            self._memory = MemoryTier(config.checkpoint.memory_directory, place)

    def take_notices(self) -> list[str]:
        """Returns what the user should know of, and was not told yet."""
        notices = [] if self._memory is None else self._memory.notices[:]
        if self._memory is not None:
            self._memory.notices.clear()
        return notices

    def save(self, step: int, trainee: Trainee, loader: Position) -> None:
        """Saves the state after a step; training may go on at once."""
        self._checkpointer.save(step, *self._state(trainee, loader))

    def is_saved(self, step: int) -> bool:
        """Whether a step is on disk."""
        return step in self._checkpointer.place.steps()

    def keep_in_memory(self, step: int, trainee: Trainee, loader: Position) -> None:
        """Keeps the state after a step in the hosts' memory; that it fails ends nothing."""
        assert self._memory is not None
        on_disk = self._checkpointer.published_step
        self._memory.save(step, *self._state(trainee, loader), on_disk=on_disk)

    def keep_diverged(self, step: int, trainee: Trainee, loader: Position) -> str:
        """Saves the state before a step that failed, apart from the others; returns where.

        Its place in the data is after the batch that failed: a run that goes on from this state
        leaves the batch out.
        """
        self._checkpointer.wait()
        with Checkpointer(self._diverged, keep=1, asynchronous=False) as checkpointer:
            checkpointer.save(step, *self._state(trainee, loader))
        return self._diverged

    def restore(self, trainee: Trainee, loader: Position) -> int:
        """Restores the newest state that is intact; returns its step, 0 if there is none."""
        restored = self._restore_from_memory(trainee) or self._restore_from_disk(trainee)
        return self._take_over(restored, loader) or 0

    def roll_back(self, trainee: Trainee, loader: Position) -> int | None:
        """Restores the newest checkpoint in the middle of a run; returns its step, None without.

        What is in the hosts' memory is of the course of the run that is given up.
        """
        self._checkpointer.wait()
        if self._memory is not None:
            self._memory.forget()
        return self._take_over(self._restore_from_disk(trainee), loader)

    def _take_over(self, restored: Restored | None, loader: Position) -> int | None:
        if restored is None or restored.identity["data"] is None:
            return None  # Nothing, or weights from elsewhere and nothing else.
        loader.load_state_dict(restored.identity["data"])
        if len(restored.ranks) == self._session.world_size:
            # With another number of ranks there is no state of chance to go on from.
            restore_random_state(restored.ranks[self._session.rank]["random"])
        return restored.step

    def finish(self) -> None:
        """Waits until everything is written."""
        self._checkpointer.wait()
        self._checkpointer.close()
        if self._memory is not None:
            self._memory.finish()

    def _restore_from_disk(self, trainee: Trainee) -> Restored | None:
        return load_newest_valid(
            self._place, lambda source: self._load(source, trainee), self._checkpointer.group
        )

    def _restore_from_memory(self, trainee: Trainee) -> Restored | None:
        if self._memory is None:
            return None
        steps = from_first(self._checkpointer.place.steps, self._checkpointer.group)
        on_disk = self._checkpointer.published_step = steps[0] if steps else -1
        restored = self._memory.load(lambda source: self._load(source, trainee), on_disk)
        if restored is None and steps:
            self._memory.notices.append("restored from disk")
        return restored

    def _state(self, trainee: Trainee, loader: Position) -> tuple[dict[str, Any], Json, Json]:
        """Returns the state, what the run says of itself, and what this rank does."""
        identity = msgspec.structs.replace(self._identity, data=loader.state_dict())
        return (
            training_state(trainee.model, trainee.optimizers, trainee.stages),
            msgspec.to_builtins(identity),
            {"random": capture_random_state()},
        )

    def _load(self, source: Source, trainee: Trainee) -> None:
        saved = identity_of(source.checkpoint)
        if difference := saved.difference(self._identity):
            raise UsageError(
                f"{self._place}: the checkpoint of step {source.checkpoint.step} is of another "
                f"model: {difference}; change out, or the model"
            )
        has_trained = saved.data is not None
        optimizers = trainee.optimizers if has_trained else {}
        load_training_state(source, trainee.model, optimizers, trainee.stages)


def _identity(config: RunConfig) -> RunIdentity:
    end = read_manifest(open_storage(config.data.sources[0].place)).end_of_document
    if config.model.hugging_face is None:
        return RunIdentity(shape=config.model.shape, end_of_document=end)
    settings = read_config(pathlib.Path(config.model.hugging_face))
    return RunIdentity(hugging_face=settings, end_of_document=end)
