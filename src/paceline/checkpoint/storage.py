"""Checkpoint locations: a local directory or a prefix of an S3 bucket, behind one protocol.

Invariant of every location: a step is either complete or absent. Ranks write files under the name
of the attempt, and one publishes them in one atomic operation. A published step is never written
again.

Names of checkpoint directories.

Checkpoints in a local directory.

An attempt is written to ``step-00000200.tmp-ID``, with an fsync per file, and gets its final name
once its manifest is written. Every process that takes part holds a shared lock on the attempt,
which ends with the process. An attempt that no process locks was left behind, and may be removed.

Checkpoints under a prefix of an S3 bucket.

Objects cannot be renamed, so an attempt's files have their final names from the start, under the
attempt's id. A step exists once its manifest does, and the manifest is created only if absent.
"""

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
from collections.abc import Iterable, Iterator
from typing import Protocol

from paceline.checkpoint.errors import CheckpointError, cannot_list, cannot_move, cannot_write
from paceline.checkpoint.format import MANIFEST, decode_manifest
from paceline.data.storage import LocalStorage, S3Storage, Storage, open_storage


class Place(Protocol):
    """A location for checkpoints by step, and for attempts to save them."""

    @property
    def url(self) -> str:
        """Path or URL of the location, as a user would write it."""

    @property
    def is_shared(self) -> bool:
        """Whether every rank sees the files of all ranks."""

    def steps(self) -> list[int]:
        """Returns the published steps, newest first."""

    def storage(self, step: int) -> Storage:
        """Returns the files of a published step."""

    def begin(self, step: int, save_id: str) -> None:
        """Prepares an attempt; one process calls it, before any process writes."""

    def write(self, step: int, save_id: str, name: str, parts: Iterable[bytes | memoryview]) -> str:
        """Writes a file of an attempt, and returns its name in the published step."""

    def sizes(self, step: int, save_id: str) -> dict[str, int]:
        """Returns the sizes of the attempt's files that this process sees, by name in the step."""

    def publish(self, step: int, save_id: str, manifest: bytes) -> None:
        """Publishes an attempt as the step; one process calls it, after all have written."""

    def abandon(self, step: int, save_id: str) -> None:
        """Removes a failed attempt."""

    def release(self, step: int, save_id: str) -> None:
        """Releases an attempt that another process publishes or abandons."""

    def remove(self, step: int) -> None:
        """Removes a published step; a partially removed step counts as absent."""

    def set_aside(self, step: int, save_id: str) -> None:
        """Renames a damaged step, and keeps it for inspection."""

    def sweep(self) -> list[str]:
        """Removes what killed processes have left behind; returns the names."""


def open_place(place: str | os.PathLike[str]) -> Place:
    """Opens the location at a directory or at ``s3://bucket/prefix``."""
    storage = open_storage(place)
    return BucketPlace(storage) if isinstance(storage, S3Storage) else DirectoryPlace(storage.url)


_STEP = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """Returns the name of a step's directory; names sort in the order of steps."""
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """Returns the step of a published checkpoint's directory, or None for any other name."""
    found = _STEP.fullmatch(name)
    return None if found is None else int(found[1])


_UNFINISHED = ".tmp-"
_SET_ASIDE = ".damaged-"


class DirectoryPlace:
    """Checkpoints in a directory, which is created with the first of them.

    Args:
        directory: Directory of the steps.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = pathlib.Path(directory)
        self._locks: dict[pathlib.Path, int] = {}

    @property
    def url(self) -> str:
        """The directory's path."""
        return str(self.directory)

    @property
    def is_shared(self) -> bool:
        """True: all ranks must use the same directory."""
        return True

    def steps(self) -> list[int]:
        """Returns the published steps, newest first."""
        with _list_errors(self.directory):
            if not self.directory.is_dir():
                return []
            found = [parse_step(path.name) for path in self.directory.iterdir() if path.is_dir()]
        return sorted((step for step in found if step is not None), reverse=True)

    def storage(self, step: int) -> LocalStorage:
        """Returns the files of a published step."""
        return LocalStorage(self._published(step))

    def begin(self, step: int, save_id: str) -> None:
        """Creates the directory of an attempt."""
        path = self._attempt(step, save_id)
        with _write_errors(path):
            if self._published(step).exists():
                raise CheckpointError(
                    f"{self._published(step)} already exists, and checkpoints are never "
                    "overwritten; remove it, or name another place"
                )
            path.mkdir(parents=True)
            self._lock(path)

    def write(self, step: int, save_id: str, name: str, parts: Iterable[bytes | memoryview]) -> str:
        """Writes a file of an attempt, and syncs it to disk."""
        attempt = self._attempt(step, save_id)
        with _write_errors(attempt / name):
            self._lock(attempt)
            _write_synchronised(attempt / name, parts)
        return name

    def sizes(self, step: int, save_id: str) -> dict[str, int]:
        """Returns the sizes of an attempt's files."""
        attempt = self._attempt(step, save_id)
        with _write_errors(attempt):
            return LocalStorage(attempt).sizes()

    def publish(self, step: int, save_id: str, manifest: bytes) -> None:
        """Writes the manifest, and renames the attempt to its final name."""
        attempt = self._attempt(step, save_id)
        with _write_errors(attempt / MANIFEST):
            _write_synchronised(attempt / MANIFEST, [manifest])
            _synchronise(attempt)
        with _write_errors(self._published(step)):
            attempt.rename(self._published(step))
            _synchronise(self.directory)
        self._unlock(attempt)

    def abandon(self, step: int, save_id: str) -> None:
        """Removes a failed attempt, as far as possible."""
        attempt = self._attempt(step, save_id)
        self._unlock(attempt)
        shutil.rmtree(attempt, ignore_errors=True)

    def release(self, step: int, save_id: str) -> None:
        """Releases an attempt, which another process has published or will remove."""
        self._unlock(self._attempt(step, save_id))

    def remove(self, step: int) -> None:
        """Removes a step; renames it first, so that a partially removed step does not count."""
        path = self._published(step)
        doomed = path.with_name(f"{path.name}{_UNFINISHED}{os.urandom(4).hex()}")
        try:
            path.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            raise cannot_move(path, error) from error

    def set_aside(self, step: int, save_id: str) -> None:
        """Renames a damaged step."""
        path = self._published(step)
        try:
            path.rename(path.with_name(f"{path.name}{_SET_ASIDE}{save_id}"))
        except OSError as error:
            raise cannot_move(path, error) from error

    def sweep(self) -> list[str]:
        """Removes the attempts that no process locks."""
        swept = []
        with _list_errors(self.directory):
            for path in sorted(self.directory.iterdir()) if self.directory.is_dir() else ():
                stem, mark, _ = path.name.partition(_UNFINISHED)
                is_attempt = mark and parse_step(stem) is not None and path.is_dir()
                if is_attempt and _is_left_behind(path):
                    shutil.rmtree(path, ignore_errors=True)
                    swept.append(path.name)
        return swept

    def _published(self, step: int) -> pathlib.Path:
        return self.directory / step_name(step)

    def _attempt(self, step: int, save_id: str) -> pathlib.Path:
        return self.directory / f"{step_name(step)}{_UNFINISHED}{save_id}"

    def _lock(self, path: pathlib.Path) -> None:
        if path in self._locks:
            return
        descriptor = os.open(path, os.O_RDONLY)
        # Some network file systems have no locks: then nothing is swept there either.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self._locks[path] = descriptor

    def _unlock(self, path: pathlib.Path) -> None:
        if (descriptor := self._locks.pop(path, None)) is not None:
            os.close(descriptor)


@contextlib.contextmanager
def _write_errors(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error


@contextlib.contextmanager
def _list_errors(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cannot_list(path, error) from error


def _write_synchronised(path: pathlib.Path, parts: Iterable[bytes | memoryview]) -> None:
    # Unbuffered, so that exactly the memory whose digest was taken is written.
    with path.open("xb", buffering=0) as file:
        for part in parts:
            rest = memoryview(part)
            while len(rest):
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def _synchronise(directory: pathlib.Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_left_behind(path: pathlib.Path) -> bool:
    """Returns whether no process holds a lock on an attempt."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


class BucketPlace:
    """Checkpoints under a prefix.

    Args:
        storage: Storage of the bucket and the prefix.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @property
    def url(self) -> str:
        """URL of the bucket and the prefix."""
        return self._storage.url

    @property
    def is_shared(self) -> bool:
        """True: there is one bucket."""
        return True

    def steps(self) -> list[int]:
        """Returns the steps that have a manifest, newest first."""
        return sorted(_published(self._storage.sizes()), reverse=True)

    def storage(self, step: int) -> Storage:
        """Returns the objects of a step."""
        return S3Storage(f"{self.url}/{step_name(step)}")

    def begin(self, step: int, save_id: str) -> None:
        """Raises if the step already exists."""
        if step in self.steps():
            raise CheckpointError(
                f"{self.url}/{step_name(step)} already exists, and checkpoints are never "
                "overwritten; remove it, or name another place"
            )

    def write(self, step: int, save_id: str, name: str, parts: Iterable[bytes | memoryview]) -> str:
        """Uploads an object, which is held in memory as a whole."""
        own_name = f"{save_id}/{name}"
        content = bytearray()
        for part in parts:
            content += part
        self._storage.write(f"{step_name(step)}/{own_name}", content)
        return own_name

    def sizes(self, step: int, save_id: str) -> dict[str, int]:
        """Returns the sizes of an attempt's objects."""
        found = self._storage.sizes(f"{step_name(step)}/{save_id}")
        return {name.removeprefix(f"{step_name(step)}/"): size for name, size in found.items()}

    def publish(self, step: int, save_id: str, manifest: bytes) -> None:
        """Creates the manifest; raises if there already is one."""
        if not self._storage.create(f"{step_name(step)}/{MANIFEST}", manifest):
            raise CheckpointError(
                f"{self.url}/{step_name(step)}/{MANIFEST}: another run has saved this step here; "
                "give each run its own prefix"
            )

    def abandon(self, step: int, save_id: str) -> None:
        """Removes the objects of an attempt."""
        for name in self._storage.sizes(f"{step_name(step)}/{save_id}"):
            self._storage.delete(name)

    def release(self, step: int, save_id: str) -> None:
        """Does nothing: no locks are held."""

    def remove(self, step: int) -> None:
        """Removes a step, its manifest first."""
        self._storage.delete(f"{step_name(step)}/{MANIFEST}")
        for name in self._storage.sizes(step_name(step)):
            self._storage.delete(name)

    def set_aside(self, step: int, save_id: str) -> None:
        """Renames the manifest of a damaged step."""
        name = f"{step_name(step)}/{MANIFEST}"
        self._storage.write(f"{name}.damaged-{save_id}", self._storage.read(name))
        self._storage.delete(name)

    def sweep(self) -> list[str]:
        """Removes unpublished attempts at steps up to the newest one.

        A run saves its steps in order, so no attempt at an older step is still in progress.
        """
        sizes = self._storage.sizes()
        newest = max(_published(sizes), default=-1)
        by_step: dict[int, list[str]] = {}
        for name in sizes:
            step = parse_step(name.partition("/")[0])
            if step is not None and step <= newest:
                by_step.setdefault(step, []).append(name)
        swept = [name for step, names in by_step.items() for name in self._left_behind(step, names)]
        for name in swept:
            self._storage.delete(name)
        return swept

    def _left_behind(self, step: int, names: list[str]) -> list[str]:
        """Returns the files of attempts that are neither published nor set aside."""
        manifests = [name for name in names if name.split("/")[1].startswith(MANIFEST)]
        attempts = {name.split("/")[1] for name in names if name not in manifests}
        if len(attempts) <= len(manifests):
            return []
        kept = {
            decode_manifest(self._storage.read(name), f"{self.url}/{name}").save_id
            for name in manifests
            if name.endswith(MANIFEST)
        }
        if len(kept) < len(manifests):
            return []  # One was set aside as damaged, and its files cannot be identified.
        return [name for name in names if name not in manifests and name.split("/")[1] not in kept]


def _published(names: Iterable[str]) -> set[int]:
    parts = (name.split("/") for name in names)
    found = (parse_step(part[0]) for part in parts if len(part) == 2 and part[1] == MANIFEST)
    return {step for step in found if step is not None}
