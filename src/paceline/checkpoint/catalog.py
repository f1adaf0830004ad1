"""Catalog of checkpoints: lists, verifies and prunes them, without torch."""

import dataclasses
import os
from collections.abc import Iterator

import blake3

from paceline.checkpoint.errors import REMEDY, CheckpointError, DamagedCheckpointError, cannot_read
from paceline.checkpoint.format import (
    MANIFEST,
    FileEntry,
    Manifest,
    decode_manifest,
    read_block,
    read_bytes,
    verify_header,
    wrong_sizes,
)
from paceline.checkpoint.storage import CheckpointStorage, open_checkpoints
from paceline.core.finding import Finding
from paceline.core.units import Progress
from paceline.data.storage import Storage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A published step with an intact manifest."""

    step: int
    storage: Storage
    manifest: Manifest


def open_checkpoint(location: CheckpointStorage, step: int) -> Checkpoint:
    """Opens a published step.

    Raises unless its manifest is intact and all its files exist in full size.
    """
    storage = location.storage(step)
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


def complete_steps(location: CheckpointStorage) -> Iterator[int]:
    """Yields the complete steps, newest first."""
    for step in location.steps():
        try:
            open_checkpoint(location, step)
        except DamagedCheckpointError:
            continue
        yield step


def keep_last(location: CheckpointStorage, number: int) -> list[int]:
    """Removes all complete checkpoints but the newest ones; returns the removed steps.

    Damaged checkpoints are neither counted nor removed: they cannot replace a complete one.
    """
    if number < 1:
        raise CheckpointError(f"{location.url}: keep at least one checkpoint, not {number}")
    removed = list(complete_steps(location))[number:]
    for step in removed:
        location.remove(step)
    return removed


_PART_BYTES = 2**24


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSummary:
    """Summary of one checkpoint, for a list."""

    step: int
    url: str
    problem: str = ""
    """Why the checkpoint is incomplete; empty if it is complete."""
    num_bytes: int = 0
    num_files: int = 0
    num_tensors: int = 0
    world_size: int = 0
    """Number of ranks that saved it."""


def list_checkpoints(where: str | os.PathLike[str]) -> list[CheckpointSummary]:
    """Returns the checkpoints of a directory or ``s3://bucket/prefix``, oldest first."""
    location = open_checkpoints(where)
    found = []
    for step in reversed(location.steps()):
        url = location.storage(step).url
        try:
            manifest = open_checkpoint(location, step).manifest
        except DamagedCheckpointError as error:
            found.append(CheckpointSummary(step=step, url=url, problem=str(error)))
            continue
        found.append(
            CheckpointSummary(
                step=step,
                url=url,
                num_bytes=manifest.num_bytes,
                num_files=len(manifest.files),
                num_tensors=len(manifest.tensors),
                world_size=manifest.world_size,
            )
        )
    return found


def verify_checkpoint(
    where: str | os.PathLike[str], step: int, progress: Progress = lambda done, total: None
) -> Iterator[Finding]:
    """Reads a whole checkpoint, and yields every difference from what was saved.

    `progress` is called with the bytes read so far and in total.
    """
    location = open_checkpoints(where)
    if step not in location.steps():
        raise CheckpointError(
            f"{location.url}: no checkpoint of step {step}; list them with `paceline checkpoint "
            "list`"
        )
    storage = location.storage(step)
    try:
        manifest = read_manifest(storage, step)
    except DamagedCheckpointError as error:
        yield Finding(name="manifest", message=str(error))
        return
    wrong = wrong_sizes(storage, manifest)
    for message in wrong.values():
        yield Finding(name="size", message=message, remedy=REMEDY)
    done = 0
    for number, file in enumerate(manifest.files):
        if file.name not in wrong:
            yield from _verify_file(storage, manifest, number, file)
        done += file.num_bytes
        progress(done, manifest.num_bytes)


def _verify_file(
    storage: Storage, manifest: Manifest, number: int, file: FileEntry
) -> Iterator[Finding]:
    """Yields the damage in a file of the right size: checks its digest, then header and blocks."""
    try:
        if _digest(storage, file) == file.blake3:
            return
    except DamagedCheckpointError as error:
        yield Finding(name="unreadable", message=str(error))
        return
    try:
        verify_header(storage, manifest, number)
    except DamagedCheckpointError as error:
        yield Finding(name="digest", message=str(error))
    for name, tensor in manifest.tensors.items():
        for chunk in (chunk for chunk in tensor.chunks if chunk.file == number):
            for block in range(len(chunk.blake3)):
                try:
                    read_block(storage, manifest, name, chunk, block)
                except DamagedCheckpointError as error:
                    yield Finding(name="digest", message=str(error))


def _digest(storage: Storage, file: FileEntry) -> str:
    digest = blake3.blake3()
    for start in range(0, file.num_bytes, _PART_BYTES):
        end = min(start + _PART_BYTES, file.num_bytes)
        digest.update(read_bytes(storage, file.name, start, end))
    return digest.hexdigest()
