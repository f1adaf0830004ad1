"""Where checkpoints are stored: a local directory or a prefix of an S3 bucket, behind one protocol.

Invariant: a step is either complete or absent. Ranks write files under the name of a pending save,
and one publishes them in one atomic operation. A published step is never written again.
"""

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from paceline.checkpoint.errors import CheckpointError, cannot_list, cannot_move, cannot_write
from paceline.checkpoint.format import MANIFEST, decode_manifest
from paceline.data.storage import LocalStorage, S3Storage, Storage, open_storage


class CheckpointStorage(Protocol):
    """A location for checkpoints by step, and for pending saves."""

    url: str
    """Path or URL of the location, as a user would write it."""
    is_shared: bool
    """Whether every rank sees the files of all ranks."""

    def steps(self) -> list[int]:
        """Returns the published steps, newest first."""

    def storage(self, step: int) -> Storage:
        """Returns the files of a published step."""

    def begin(self, step: int, save_id: str) -> None:
        """Prepares a pending save; one process calls it, before any process writes."""

    def write(self, step: int, save_id: str, name: str, parts: Iterable[bytes | memoryview]) -> str:
        """Writes a file of a pending save, and returns its name in the published step."""

    def sizes(self, step: int, save_id: str) -> dict[str, int]:
        """Returns the sizes of the files that this process sees, by name in the step."""

    def publish(self, step: int, save_id: str, manifest: bytes) -> None:
        """Publishes a pending save as the step; one process calls it, after all have written."""

    def abandon(self, step: int, save_id: str) -> None:
        """Removes a failed save."""

    def release(self, step: int, save_id: str) -> None:
        """Releases a pending save that another process publishes or abandons."""

    def remove(self, step: int) -> None:
        """Removes a published step; a partially removed step counts as absent."""

    def quarantine(self, step: int, save_id: str) -> None:
        """Renames a damaged step, and keeps it for inspection."""

    def sweep(self) -> list[str]:
        """Removes what killed processes have left behind; returns the names."""


def open_checkpoints(location: str | os.PathLike[str]) -> CheckpointStorage:
    """Opens the location at a directory or at ``s3://bucket/prefix``."""
    storage = open_storage(location)
    return (
        BucketStorage(storage) if isinstance(storage, S3Storage) else DirectoryStorage(storage.url)
    )


_STEP = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """Returns the name of a step's directory; names sort in the order of steps."""
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """Returns the step of a published checkpoint's directory, or None for any other name."""
    found = _STEP.fullmatch(name)
    return None if found is None else int(found[1])


_UNFINISHED = ".tmp-"
_QUARANTINED = ".damaged-"


class DirectoryStorage:
    """Checkpoints in a directory, which is created with the first of them.

    A pending save is written to ``step-00000200.tmp-ID``, with an fsync per file, and gets its
    final name once its manifest is written. Every process that takes part holds a shared lock on
    it, which ends with the process. Without a lock it was left behind, and may be removed.
    """

    is_shared = True

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = pathlib.Path(directory)
        self.url = str(directory)
        self._locks: dict[pathlib.Path, int] = {}

    def steps(self) -> list[int]:
        """Returns the published steps, newest first."""
        with file_errors(self.directory, cannot_list):
            if not self.directory.is_dir():
                return []
            found = [parse_step(path.name) for path in self.directory.iterdir() if path.is_dir()]
        return sorted((step for step in found if step is not None), reverse=True)

    def storage(self, step: int) -> LocalStorage:
        """Returns the files of a published step."""
        return LocalStorage(self._published(step))

    def begin(self, step: int, save_id: str) -> None:
        """Creates the directory of a pending save."""
        path = self._pending(step, save_id)
        with file_errors(path):
            if self._published(step).exists():
                raise CheckpointError(
                    f"{self._published(step)} already exists, and checkpoints are never "
                    "overwritten; remove it, or name another place"
                )
            path.mkdir(parents=True)
            self._lock(path)

    def write(self, step: int, save_id: str, name: str, parts: Iterable[bytes | memoryview]) -> str:
        """Writes a file of a pending save, and syncs it to disk."""
        pending = self._pending(step, save_id)
        with file_errors(pending / name):
            self._lock(pending)
            _write_synchronised(pending / name, parts)
        return name

    def sizes(self, step: int, save_id: str) -> dict[str, int]:
        """Returns the sizes of a pending save's files."""
        pending = self._pending(step, save_id)
        with file_errors(pending):
            return LocalStorage(pending).sizes()

    def publish(self, step: int, save_id: str, manifest: bytes) -> None:
        """Writes the manifest, and renames the pending save to its final name."""
        pending = self._pending(step, save_id)
        with file_errors(pending / MANIFEST):
            _write_synchronised(pending / MANIFEST, [manifest])
            _synchronise(pending)
        with file_errors(self._published(step)):
            pending.rename(self._published(step))
            _synchronise(self.directory)
        self._unlock(pending)

    def abandon(self, step: int, save_id: str) -> None:
        """Removes a failed save, as far as possible."""
        pending = self._pending(step, save_id)
        self._unlock(pending)
        shutil.rmtree(pending, ignore_errors=True)

    def release(self, step: int, save_id: str) -> None:
        """Releases a pending save, which another process has published or will remove."""
        self._unlock(self._pending(step, save_id))

    def remove(self, step: int) -> None:
        """Removes a step; renames it first, so that a partially removed step does not count."""
        path = self._published(step)
        doomed = path.with_name(f"{path.name}{_UNFINISHED}{os.urandom(4).hex()}")
        with file_errors(path, cannot_move):
            path.rename(doomed)
            shutil.rmtree(doomed)

    def quarantine(self, step: int, save_id: str) -> None:
        """Renames a damaged step."""
        path = self._published(step)
        with file_errors(path, cannot_move):
            path.rename(path.with_name(f"{path.name}{_QUARANTINED}{save_id}"))

    def sweep(self) -> list[str]:
        """Removes the pending saves that no process locks."""
        swept = []
        with file_errors(self.directory, cannot_list):
            for path in sorted(self.directory.iterdir()) if self.directory.is_dir() else ():
                stem, mark, _ = path.name.partition(_UNFINISHED)
                is_pending = mark and parse_step(stem) is not None and path.is_dir()
                if is_pending and _is_left_behind(path):
                    shutil.rmtree(path, ignore_errors=True)
                    swept.append(path.name)
        return swept

    def _published(self, step: int) -> pathlib.Path:
        return self.directory / step_name(step)

    def _pending(self, step: int, save_id: str) -> pathlib.Path:
        return self.directory / f"{step_name(step)}{_UNFINISHED}{save_id}"

    def _lock(self, path: pathlib.Path) -> None:
        if path not in self._locks:
            self._locks[path] = shared_lock(path)

    def _unlock(self, path: pathlib.Path) -> None:
        if (descriptor := self._locks.pop(path, None)) is not None:
            os.close(descriptor)


@contextlib.contextmanager
def file_errors(
    path: pathlib.Path, make: Callable[[pathlib.Path, OSError], CheckpointError] = cannot_write
) -> Iterator[None]:
    """Raises a `CheckpointError` that names the path for an `OSError` inside."""
    try:
        yield
    except OSError as error:
        raise make(path, error) from error


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


def shared_lock(directory: pathlib.Path) -> int:
    """Returns a descriptor that holds a shared lock on a directory until it is closed."""
    descriptor = os.open(directory, os.O_RDONLY)
    # Some network file systems have no locks: then nothing is swept there either.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def _is_left_behind(path: pathlib.Path) -> bool:
    """Returns whether no process holds a lock on a pending save."""
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


class BucketStorage:
    """Checkpoints under a prefix of an S3 bucket.

    Objects cannot be renamed, so the files of a pending save have their final names from the start,
    under its id. A step exists once its manifest does, and the manifest is created only if absent.
    """

    is_shared = True

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.url = storage.url

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
        """Returns the sizes of a pending save's objects."""
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
        """Removes the objects of a pending save."""
        for name in self._storage.sizes(f"{step_name(step)}/{save_id}"):
            self._storage.delete(name)

    def release(self, step: int, save_id: str) -> None:
        """Does nothing: no locks are held."""

    def remove(self, step: int) -> None:
        """Removes a step, its manifest first."""
        self._storage.delete(f"{step_name(step)}/{MANIFEST}")
        for name in self._storage.sizes(step_name(step)):
            self._storage.delete(name)

    def quarantine(self, step: int, save_id: str) -> None:
        """Renames the manifest of a damaged step."""
        name = f"{step_name(step)}/{MANIFEST}"
        self._storage.write(f"{name}.damaged-{save_id}", self._storage.read(name))
        self._storage.delete(name)

    def sweep(self) -> list[str]:
        """Removes pending saves at steps up to the newest one.

        A run saves its steps in order, so no save of an older step is still in progress.
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
        """Returns the files of pending saves that are neither published nor set aside."""
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
