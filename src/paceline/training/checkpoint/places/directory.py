"""Checkpoints in a local directory.

An attempt is written to ``step-00000200.tmp-ID``, with an fsync per file, and gets its final name
once its manifest is written. Every process that takes part holds a shared lock on the attempt,
which ends with the process. An attempt that no process locks was left behind, and may be removed.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator

from paceline.data.storage.local import LocalStorage
from paceline.training.checkpoint.errors import (
    CheckpointError,
    cannot_list,
    cannot_move,
    cannot_write,
)
from paceline.training.checkpoint.format.manifest import MANIFEST
from paceline.training.checkpoint.places.names import parse_step, step_name

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
