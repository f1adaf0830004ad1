"""Checkpoints in host memory: files on a tmpfs, which outlive the process that wrote them.

A run has one directory per host, private to its user and named after the run. Every rank writes its
own files there, and replicas of the files that a rank of another host sends. Each host publishes
its part with a rename, once all ranks have written theirs.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import time
from collections.abc import Iterable

import blake3
import msgspec

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.storage import DirectoryStorage, file_errors, shared_lock
from paceline.core.files import create_atomically

_PREFIX = "paceline-"
_OWNER = "owner.json"
_HOST = "host"
_REPLICAS = "replicas"
_STALE_S = 24 * 3600.0
"""Seconds without a save after which a directory that no process locks is stale."""


class _Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The run that owns a directory."""

    token_file: str
    """Path of the run's token file."""
    token: str


def run_token(path: pathlib.Path) -> str:
    """Returns the token that distinguishes this run from earlier runs in the same directory.

    Creates the token if there is none.
    """
    with file_errors(path):
        return _read_or_create(path)


class MemoryStorage(DirectoryStorage):
    """A run's checkpoints in the memory of this host, below a tmpfs directory such as /dev/shm."""

    is_shared = False

    def __init__(self, root: str | os.PathLike[str], token_file: str, token: str) -> None:
        owner = _Owner(token_file=token_file, token=token)
        content = msgspec.json.encode(owner)
        digest = blake3.blake3(content).hexdigest()[:24]
        super().__init__(pathlib.Path(root) / f"{_PREFIX}{digest}")
        with file_errors(self.directory):
            _sweep_stale(pathlib.Path(root), self.directory)
            self.directory.mkdir(mode=0o700, exist_ok=True)
            _require_private(self.directory)
            self._held: int | None = shared_lock(self.directory)
            (self.directory / _OWNER).write_bytes(content)
            self.host = _read_or_create(self.directory / _HOST)
            """Identifier that only the ranks that share this memory have."""
        self.manifest = b""
        """Manifest of the newest save, on the first rank."""

    def begin(self, step: int, save_id: str) -> None:
        """Does nothing: every host creates its own directories."""

    def write(self, step: int, save_id: str, name: str, parts: Iterable[bytes | memoryview]) -> str:
        """Writes a file of this rank."""
        self._make(self._pending(step, save_id))
        return super().write(step, save_id, name, parts)

    def publish(self, step: int, save_id: str, manifest: bytes) -> None:
        """Keeps the manifest until all hosts can publish it."""
        self.manifest = manifest

    def publish_here(self, step: int, save_id: str, manifest: bytes) -> None:
        """Publishes this host's part; one rank per host calls it."""
        self._make(self._pending(step, save_id))
        super().publish(step, save_id, manifest)

    def own_file(self, step: int, save_id: str, name: str) -> pathlib.Path:
        """Returns the path of a file that this rank has written."""
        return self._pending(step, save_id) / name

    def reserve(self, step: int, save_id: str, name: str, num_bytes: int) -> pathlib.Path:
        """Allocates space for a replica, and returns its path; raises if there is not enough.

        Otherwise, a full tmpfs would kill the process at the first write to a page without memory.
        """
        path = self._pending(step, save_id) / _REPLICAS / name
        self._make(path.parent)
        with file_errors(path), path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        return path

    def file_path(self, step: int, name: str, *, is_replica: bool) -> pathlib.Path:
        """Returns the path at which this host would hold a published file or its replica."""
        published = self._published(step)
        return (published / _REPLICAS if is_replica else published) / name

    def remove_others(self, step: int | None) -> None:
        """Removes all steps but `step`, or all if it is None; one rank per host calls it."""
        for other in self.steps():
            if other != step:
                self.remove(other)

    def remove_all(self) -> None:
        """Frees the memory; one rank per host calls it, after the others have released it."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def close(self) -> None:
        """Unlocks the directory, which may count as stale from now on."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _make(self, path: pathlib.Path) -> None:
        with file_errors(path):
            path.mkdir(parents=True, exist_ok=True)


def _read_or_create(path: pathlib.Path) -> str:
    """Returns a file's random content, which the first process draws."""
    if not path.exists():
        create_atomically(path, os.urandom(16).hex().encode("ascii"))
    return path.read_text(encoding="ascii")


def _require_private(directory: pathlib.Path) -> None:
    """Raises if other users could have written to it: anyone may write to /dev/shm."""
    found = directory.lstat()
    is_own = directory.is_dir() and not directory.is_symlink() and found.st_uid == os.geteuid()
    if not is_own or found.st_mode & 0o077:
        raise CheckpointError(
            f"{directory}: belongs to another user, or other users can open it; remove it, or set "
            "checkpoint.memory_directory to a tmpfs of your own"
        )


def _sweep_stale(root: pathlib.Path, own: pathlib.Path) -> None:
    """Removes the directories of runs that are gone, or have saved nothing for a day."""
    for path in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path != own and path.lstat().st_uid == os.geteuid() and _is_stale(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_stale(path: pathlib.Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner = msgspec.json.decode((path / _OWNER).read_bytes(), type=_Owner)
        token_file = pathlib.Path(owner.token_file)
        is_gone = not token_file.exists() or token_file.read_text("ascii") != owner.token
        return is_gone or time.time() - path.stat().st_mtime > _STALE_S
    except (OSError, msgspec.MsgspecError):
        return False  # A process holds it, or it is not ours.
    finally:
        os.close(descriptor)
