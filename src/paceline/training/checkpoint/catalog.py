"""Catalog of checkpoints: which ones are complete, and which ones to keep."""

import dataclasses
from collections.abc import Iterator

from paceline.data.storage import Storage
from paceline.training.checkpoint.errors import (
    REMEDY,
    CheckpointError,
    DamagedCheckpointError,
    cannot_read,
)
from paceline.training.checkpoint.format.blocks import wrong_sizes
from paceline.training.checkpoint.format.manifest import MANIFEST, Manifest, decode_manifest
from paceline.training.checkpoint.places import Place


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A published step with an intact manifest."""

    step: int
    storage: Storage
    manifest: Manifest


def open_checkpoint(place: Place, step: int) -> Checkpoint:
    """Opens a published step.

    Raises unless its manifest is intact and all its files exist in full size.

    Args:
        place: Location of the checkpoints.
        step: A published step.
    """
    storage = place.storage(step)
    manifest = read_manifest(storage, step)
    for wrong in wrong_sizes(storage, manifest).values():
        raise DamagedCheckpointError(f"{wrong}; {REMEDY}")
    return Checkpoint(step=step, storage=storage, manifest=manifest)


def read_manifest(storage: Storage, step: int) -> Manifest:
    """Returns the manifest of a step; raises if it is missing or damaged."""
    where = f"{storage.url}/{MANIFEST}"
    try:
        content = storage.read(MANIFEST)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{where} is missing; {REMEDY}") from None
    except OSError as error:
        raise cannot_read(where, error) from error
    manifest = decode_manifest(content, where)
    if manifest.step != step:
        raise DamagedCheckpointError(f"{where} belongs to step {manifest.step}; {REMEDY}")
    return manifest


def complete_steps(place: Place) -> Iterator[int]:
    """Yields the complete steps, newest first."""
    for step in place.steps():
        try:
            open_checkpoint(place, step)
        except DamagedCheckpointError:
            continue
        yield step


def keep_last(place: Place, number: int) -> list[int]:
    """Removes all complete checkpoints but the newest ones; returns the removed steps.

    Damaged checkpoints are neither counted nor removed: they cannot replace a complete one.

    Args:
        place: Location of the checkpoints.
        number: Number of checkpoints to keep, at least one.
    """
    if number < 1:
        raise CheckpointError(f"{place.url}: keep at least one checkpoint, not {number}")
    removed = list(complete_steps(place))[number:]
    for step in removed:
        place.remove(step)
    return removed
