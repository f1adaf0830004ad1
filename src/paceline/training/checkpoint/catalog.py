"""Which checkpoints a place holds, whether they are complete, and which of them to keep."""

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
    """A published step with its manifest, which is intact."""

    step: int
    storage: Storage
    manifest: Manifest


def open_checkpoint(place: Place, step: int) -> Checkpoint:
    """Returns a step, if its manifest is intact and all its files are there in full size.

    Args:
        place: Where checkpoints live.
        step: One that was published.
    """
    storage = place.storage(step)
    manifest = read_manifest(storage, step)
    for wrong in wrong_sizes(storage, manifest).values():
        raise DamagedCheckpointError(f"{wrong}; {REMEDY}")
    return Checkpoint(step=step, storage=storage, manifest=manifest)


def read_manifest(storage: Storage, step: int) -> Manifest:
    """Returns the manifest of a step, if it is there and intact."""
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
    """Yields the steps that are complete, the newest first."""
    for step in place.steps():
        try:
            open_checkpoint(place, step)
        except DamagedCheckpointError:
            continue
        yield step


def keep_last(place: Place, number: int) -> list[int]:
    """Removes all complete checkpoints but the newest ones, and returns their steps.

    What is damaged is neither counted nor removed: it is no substitute for a complete one.

    Args:
        place: Where checkpoints live.
        number: How many stay, at least one.
    """
    if number < 1:
        raise CheckpointError(f"{place.url}: keep at least one checkpoint, not {number}")
    removed = list(complete_steps(place))[number:]
    for step in removed:
        place.remove(step)
    return removed
