"""Shards from S3 in a local directory of bounded size, which the processes of a machine share.

A shard is fetched whole, as only a whole one can be checked against its digest, and takes its name
when it is complete. When there is no room, those go that nobody has open and that were not opened
for longest. A file is locked while it is mapped, also by other processes, so that what is deleted
frees its space at once. Several processes that want the same shard fetch it once.
"""

import contextlib
import fcntl
import os
import pathlib
import time
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import blake3

from paceline.core.errors import DataError
from paceline.core.units import format_binary_bytes
from paceline.data.format.manifest import Manifest, SplitName
from paceline.data.loader.fetch_ahead import FetchAhead
from paceline.data.storage import Storage
from paceline.data.storage.local import LocalStorage

_NUM_LOCKS = 64
_CHECKS = 2
"""Times that a shard is fetched before its digest counts as wrong."""
_FETCHES_AT_ONCE = 2
_ABANDONED_S = 3600.0
"""Age at which an unfinished file must be that of a killed process."""


class ShardCache:
    """Files of one split of a dataset, fetched when they are first opened.

    Args:
        storage: Where the dataset is.
        manifest: Its manifest, which knows the digests.
        split: The split.
        directory: Where fetched files are kept, of this and of other datasets.
        most_bytes: What all files in the directory may take.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        split: SplitName,
        *,
        directory: str | os.PathLike[str],
        most_bytes: int,
    ) -> None:
        self._storage = storage
        self._root = pathlib.Path(directory)
        self._files = LocalStorage(self._root / manifest.fingerprint[:32])
        self._most_bytes = most_bytes
        self._manifest = manifest
        self._entries = manifest.splits[split].shard_entries()
        self._root.mkdir(parents=True, exist_ok=True)
        self._fetch_ahead: FetchAhead | None = None

    def open(self, name: str) -> BinaryIO:
        """Returns a file that stays where it is until it is closed and unmapped."""
        while True:
            file = self._open_cached(name)
            if file is not None:
                return file
            self._fetch(name)

    def fetch_ahead(self, names: Iterable[str]) -> None:
        """Begins to fetch files that will be opened soon; what fails is left to `open`."""
        if self._fetch_ahead is None:
            self._fetch_ahead = FetchAhead(self._fetch, _FETCHES_AT_ONCE)
        self._fetch_ahead.ask(name for name in names if not self._files.path(name).exists())

    def close(self) -> None:
        """Fetches nothing more."""
        if self._fetch_ahead is not None:
            self._fetch_ahead.close()
            self._fetch_ahead = None

    def _open_cached(self, name: str) -> BinaryIO | None:
        try:
            file = self._files.path(name).open("rb")
        except FileNotFoundError:
            return None
        try:
            # The lock belongs to the open file, which its mapping keeps open.
            fcntl.flock(file, fcntl.LOCK_SH)
            status = os.fstat(file.fileno())
            if status.st_nlink and status.st_size == self._expected(name)[1]:
                os.utime(file.fileno())
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # Deleted before it was locked.
        return None

    def _fetch(self, name: str) -> None:
        with self._locked(f"fetch-{_stable_hash(name) % _NUM_LOCKS}"):
            if self._is_there(name):
                return  # Another process has fetched it meanwhile.
            content = self._read_checked(name)
            with self._locked("room"):
                self._make_room(name, len(content))
                try:
                    self._files.write(name, content)
                except OSError as error:
                    raise DataError(
                        f"{self._root}: cannot cache {name}: {error.strerror}; free disk space or "
                        "name another cache directory"
                    ) from error

    def _expected(self, name: str) -> tuple[str, int]:
        """Returns the digest and the size that a file must have."""
        path = pathlib.PurePosixPath(name)
        entry = self._entries[int(path.stem)]
        sizes = self._manifest.shard_sizes(entry)
        if path.suffix == ".tokens":
            return entry.tokens_blake3, sizes.tokens
        return entry.documents_blake3, sizes.documents

    def _is_there(self, name: str) -> bool:
        try:
            return self._files.path(name).stat().st_size == self._expected(name)[1]
        except FileNotFoundError:
            return False

    def _read_checked(self, name: str) -> bytes:
        expected, num_bytes = self._expected(name)
        for _ in range(_CHECKS):
            try:
                content = self._storage.read(name)
            except FileNotFoundError as error:
                raise DataError(
                    f"{self._storage.url}/{name}: listed in the manifest, but missing; prepare "
                    "the dataset again"
                ) from error
            if blake3.blake3(content).hexdigest() == expected:
                return content
        raise DataError(
            f"{self._storage.url}/{name}: does not match its digest in the manifest "
            f"({len(content):,} bytes instead of {num_bytes:,}; fetched {_CHECKS} times); run "
            "`paceline data verify`"
        )

    def _make_room(self, name: str, num_bytes: int) -> None:
        files = []
        for path in self._root.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if path.is_file():
                    files.append((status.st_mtime, status.st_size, path))
        taken = sum(size for _, size, _ in files)
        for modified, size, path in sorted(files):
            if taken + num_bytes <= self._most_bytes:
                return
            if path.parent != self._root and _delete_unused(path, modified):
                taken -= size
        if taken + num_bytes > self._most_bytes:
            raise DataError(
                f"{self._root}: no space in the cache for {name} "
                f"({format_binary_bytes(num_bytes)}): of at most "
                f"{format_binary_bytes(self._most_bytes)}, {format_binary_bytes(taken)} are in "
                "use; raise cache_bytes or use a smaller window"
            )

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with (self._root / f".{name}.lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _delete_unused(path: pathlib.Path, modified: float) -> bool:
    """Deletes a file that nobody has open; tells whether it did."""
    if path.name.startswith(".") and time.time() - modified < _ABANDONED_S:
        return False
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except (BlockingIOError, FileNotFoundError):
        return False
    return True


def _stable_hash(name: str) -> int:
    """Returns a number that is the same in every process, unlike that of `hash`."""
    return int.from_bytes(blake3.blake3(name.encode()).digest(4), "little")
