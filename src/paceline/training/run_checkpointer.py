"""Saves and restores the state of a run: weights, optimizers, data position, random state.

Saved states do not depend on world size or strategy: a run can resume with any of them. Their
metadata identifies the model. Several sites save states of their own.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from paceline.accounting.model_config import read_config_json
from paceline.checkpoint.catalog import Checkpoint
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.format import Json
from paceline.checkpoint.memory import MemoryTier
from paceline.checkpoint.restore import Restored, Source, load_newest_valid
from paceline.checkpoint.state import (
    capture_random_state,
    load_training_state,
    restore_random_state,
    training_state,
)
from paceline.core.errors import UsageError
from paceline.core.specs import ModelShape
from paceline.core.units import one_line
from paceline.data.manifest import read_manifest
from paceline.data.storage import open_storage
from paceline.parallel import Session
from paceline.parallel.ranks.collectives import from_first
from paceline.records.store import UNDECODABLE
from paceline.training.config import RunConfig
from paceline.training.parallelize import TrainState
from paceline.training.run_directory import CHECKPOINTS, DIVERGED
from paceline.training.site_checkpoints import (
    directory_of_site,
    load_newest_of_all,
    load_outer_state,
    new_site_group,
    outer_state,
)


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A model, and the position of its training."""

    shape: ModelShape | None = None
    """Shape of a `TransformerLM`."""
    hugging_face: dict[str, Any] | None = None
    """config.json of a Hugging Face model that is trained as is."""
    end_of_document: int | None = None
    """Token that ends a document, if known."""
    data: Json = None
    """Position in the data; None for imported weights that were not trained yet."""

    @property
    def model(self) -> dict[str, Any]:
        """Everything that distinguishes the model from others, by name, with derived values."""
        if self.shape is None:
            config = dict(self.hugging_face or {})
            config.pop("transformers_version", None)  # Identifies the writer, not the model.
            return config
        return dataclasses.asdict(
            dataclasses.replace(
                self.shape, head_dim=self.shape.head_width, num_kv_heads=self.shape.key_value_heads
            )
        )

    def difference(self, other: "RunIdentity") -> str:
        """Returns the differences from another model, by name; empty if there are none."""
        saved, own = self.model, other.model
        if (self.shape is None) != (other.shape is None):
            return f"{self._kind} instead of {other._kind}"
        return ", ".join(
            f"{name} {saved.get(name)} instead of {own.get(name)}"
            for name in dict.fromkeys((*saved, *own))
            if saved.get(name) != own.get(name)
        )

    @property
    def _kind(self) -> str:
        if self.shape is not None:
            return "Paceline's own model"
        return f"a Hugging Face {self.model.get('model_type')}"


def identity_of(checkpoint: Checkpoint) -> RunIdentity:
    """Returns the identity of the run that saved a checkpoint."""
    try:
        identity = msgspec.json.decode(checkpoint.manifest.identity, type=RunIdentity)
    except UNDECODABLE as error:
        raise CheckpointError(
            f"{checkpoint.storage.url}: does not record its model: {one_line(error)}; only "
            "checkpoints of paceline train do, from this version on"
        ) from error
    if identity.shape is None and identity.hugging_face is None:
        raise CheckpointError(
            f"{checkpoint.storage.url}: does not record its model; only checkpoints of paceline "
            "train do"
        )
    return identity


class Position(Protocol):
    """Position of a run in its data."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the position."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a position."""


class RunCheckpointer:
    """Saves and restores the states of one run, in its directory.

    Every rank creates one and makes the same calls.
    """

    def __init__(self, config: RunConfig, session: Session) -> None:
        directory = directory_of_site(config, session)
        settings = config.checkpoint
        self._has_sites = config.parallel.outer.sites > 1
        self._num_ranks = config.parallel.site_ranks(session.world_size)
        self._config = config
        self._session = session
        self._location = str(directory / CHECKPOINTS)
        self._diverged = str(directory / DIVERGED)
        self._identity = _identity(config)
        self._checkpointer = Checkpointer(
            self._location,
            keep=settings.keep_last,
            asynchronous=settings.asynchronous,
            group=new_site_group(config, session) if self._has_sites else None,
        )
        self._memory: MemoryTier | None = None
        if settings.memory_every_steps:
            self._memory = MemoryTier(settings.memory_directory, self._location)

    def take_notices(self) -> list[str]:
        """Returns and clears the pending notices for the user."""
        notices = [] if self._memory is None else self._memory.notices[:]
        if self._memory is not None:
            self._memory.notices.clear()
        return notices

    def save(self, step: int, train_state: TrainState, loader: Position) -> None:
        """Saves the state after a step; training may continue immediately."""
        self._checkpointer.save(step, *self._state(train_state, loader))

    def is_saved(self, step: int) -> bool:
        """Returns whether a step is on disk."""
        return step in self._checkpointer.location.steps()

    def save_in_memory(self, step: int, train_state: TrainState, loader: Position) -> None:
        """Saves the state after a step in host memory; a failure does not end the run."""
        assert self._memory is not None
        on_disk = self._checkpointer.published_step
        self._memory.save(step, *self._state(train_state, loader), on_disk=on_disk)

    def save_diverged(self, step: int, train_state: TrainState, loader: Position) -> str:
        """Saves the state before a failed step, apart from the checkpoints; returns the location.

        Its data position is after the failed batch, so that a run that resumes from it skips the
        batch.
        """
        self._checkpointer.wait()
        group = None if train_state.outer is None else new_site_group(self._config, self._session)
        with Checkpointer(self._diverged, keep=1, asynchronous=False, group=group) as checkpointer:
            checkpointer.save(step, *self._state(train_state, loader))
        return self._diverged

    def restore(self, train_state: TrainState, loader: Position) -> int:
        """Restores the newest intact state; returns its step, or 0 if there is none."""
        restored = self._restore_from_memory(train_state) or self._restore_from_disk(train_state)
        return self._take_over(restored, loader) or 0

    def roll_back(self, train_state: TrainState, loader: Position) -> int | None:
        """Restores the newest checkpoint during a run; returns its step, or None if there is none.

        Discards states in host memory, because they belong to the abandoned part of the run.
        """
        self._checkpointer.wait()
        if self._memory is not None:
            self._memory.forget()
        return self._take_over(self._restore_from_disk(train_state), loader)

    def _take_over(self, restored: Restored | None, loader: Position) -> int | None:
        if restored is None or restored.identity["data"] is None:
            return None  # Nothing, or only imported weights.
        loader.load_state_dict(restored.identity["data"])
        if len(restored.ranks) == self._num_ranks:
            # Random states are per rank, so they cannot be restored at another world size.
            own = restored.ranks[self._session.rank % self._num_ranks]
            restore_random_state(own["random"], self._session.device)
        return restored.step

    def finish(self) -> None:
        """Waits until everything is written, then closes."""
        self._checkpointer.wait()
        self._checkpointer.close()
        if self._memory is not None:
            self._memory.finish()

    def _restore_from_disk(self, train_state: TrainState) -> Restored | None:
        if self._has_sites:
            group = self._checkpointer.group
            assert group is not None
            return load_newest_of_all(
                self._checkpointer.location, lambda source: self._load(source, train_state), group
            )
        return load_newest_valid(
            self._location, lambda source: self._load(source, train_state), self._checkpointer.group
        )

    def _restore_from_memory(self, train_state: TrainState) -> Restored | None:
        if self._memory is None:
            return None
        steps = from_first(self._checkpointer.location.steps, self._checkpointer.group)
        on_disk = self._checkpointer.published_step = steps[0] if steps else -1
        restored = self._memory.load(lambda source: self._load(source, train_state), on_disk)
        if restored is None and steps:
            self._memory.notices.append("restored from disk")
        return restored

    def _state(
        self, train_state: TrainState, loader: Position
    ) -> tuple[dict[str, Any], Json, Json]:
        """Returns the state, the run's metadata, and this rank's metadata."""
        identity = msgspec.structs.replace(self._identity, data=loader.state_dict())
        state = training_state(train_state.model, train_state.optimizers, train_state.stages)
        outer, outer_of_rank = outer_state(train_state.outer, self._session)
        return (
            {**state, **outer},
            msgspec.to_builtins(identity),
            {"random": capture_random_state(self._session.device), **outer_of_rank},
        )

    def _load(self, source: Source, train_state: TrainState) -> None:
        saved = identity_of(source.checkpoint)
        if difference := saved.difference(self._identity):
            raise UsageError(
                f"{self._location}: the checkpoint of step {source.checkpoint.step} is of another "
                f"model: {difference}; change out, or the model"
            )
        has_trained = saved.data is not None
        optimizers = train_state.optimizers if has_trained else {}
        load_training_state(source, train_state.model, optimizers, train_state.stages)
        if train_state.outer is not None:
            load_outer_state(source, train_state.outer, self._session, is_new=not has_trained)


def _identity(config: RunConfig) -> RunIdentity:
    end = read_manifest(open_storage(config.data.sources[0].place)).end_of_document
    if config.model.hugging_face is None:
        return RunIdentity(shape=config.model.shape, end_of_document=end)
    settings = read_config_json(pathlib.Path(config.model.hugging_face))
    return RunIdentity(hugging_face=settings, end_of_document=end)
