"""A local cache of shards from S3, with bounded size, shared by the processes of a machine.

A shard is fetched whole, because only a whole shard can be checked against its digest, and is
renamed when it is complete. When the cache is full, the least recently opened files that no process
has open are deleted. A file stays locked while any process has it mapped, so deleting a file frees
its space immediately. Processes that need the same shard fetch it only once.

Threads fetch files before they are needed. Their errors are ignored: the same fetch fails again
where the file is needed and is reported there. The threads end with `close`, with the last
reference to their owner, or with the interpreter, which waits for the fetches in flight.
"""

import contextlib
import fcntl
import os
import pathlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

import blake3

from paceline.core.errors import DataError
from paceline.core.units import format_binary_bytes
from paceline.data.manifest import DatasetManifest, SplitName
from paceline.data.storage import LocalStorage, Storage


class FetchAhead:
    """Calls a bound method, whose object it does not keep alive, for each requested name."""

    def __init__(self, fetch: Callable[[str], None], num_threads: int) -> None:
        names: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        asked: set[str] = set()
        stop = threading.Event()
        threads = [
            threading.Thread(
                target=_call_for_names,
                args=(weakref.WeakMethod(fetch), names, asked, stop),
                name="fetch-ahead",
                daemon=True,
            )
            for _ in range(num_threads)
        ]
        self._names, self._asked = names, asked
        self._finalizer = weakref.finalize(self, _end, threads, names, stop)
        for thread in threads:
            thread.start()

    def ask(self, names: Iterable[str]) -> None:
        """Queues a call for each name, unless one is already queued or in flight."""
        for name in names:
            if name not in self._asked:
                self._asked.add(name)
                self._names.put(name)

    def close(self) -> None:
        """Starts no more calls, and waits for those in flight."""
        self._finalizer()


def _call_for_names(
    fetch: "weakref.WeakMethod[Callable[[str], None]]",
    names: "queue.SimpleQueue[str | None]",
    asked: set[str],
    stop: threading.Event,
) -> None:
    while (name := names.get()) is not None and not stop.is_set():
        method = fetch()
        if method is None:
            return
        with contextlib.suppress(Exception):
            method(name)
        del method  # Otherwise the wait for the next name would keep its object alive.
        asked.discard(name)


def _end(
    threads: list[threading.Thread], names: "queue.SimpleQueue[str | None]", stop: threading.Event
) -> None:
    stop.set()
    for _ in threads:
        names.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


_NUM_LOCKS = 64
_CHECKS = 2
"""Number of times that a shard with a wrong digest is fetched before it is an error."""
_FETCHES_AT_ONCE = 2
_ABANDONED_S = 3600.0
"""Age at which a partial file must belong to a killed process."""


class ShardCache:
    """Files of one split of a dataset, fetched when they are first opened."""

    def __init__(
        self,
        storage: Storage,
        manifest: DatasetManifest,
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
        """Returns an open file that is not evicted until it is closed and unmapped."""
        while True:
            file = self._open_cached(name)
            if file is not None:
                return file
            self._fetch(name)

    def fetch_ahead(self, names: Iterable[str]) -> None:
        """Starts to fetch files that will be opened soon; errors are left to `open`."""
        if self._fetch_ahead is None:
            self._fetch_ahead = FetchAhead(self._fetch, _FETCHES_AT_ONCE)
        self._fetch_ahead.ask(name for name in names if not self._files.path(name).exists())

    def close(self) -> None:
        """Stops fetching ahead."""
        if self._fetch_ahead is not None:
            self._fetch_ahead.close()
            self._fetch_ahead = None

    def _open_cached(self, name: str) -> BinaryIO | None:
        try:
            file = self._files.path(name).open("rb")
        except FileNotFoundError:
            return None
        try:
            # The lock belongs to the open file description, which the mapping keeps open.
            fcntl.flock(file, fcntl.LOCK_SH)
            status = os.fstat(file.fileno())
            if status.st_nlink and status.st_size == self._expected(name)[1]:
                os.utime(file.fileno())
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # It was deleted before it was locked, or has the wrong size.
        return None

    def _fetch(self, name: str) -> None:
        with self._locked(f"fetch-{_stable_hash(name) % _NUM_LOCKS}"):
            if self._is_there(name):
                return  # Another process has fetched it in the meantime.
            content = self._read_checked(name)
            with self._locked("room"):
                self._make_room(name, len(content))
                self._files.write(name, content)

    def _expected(self, name: str) -> tuple[str, int]:
        """Returns the expected digest and size of a file."""
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
    """Deletes a file unless a process has it open; returns whether it was deleted."""
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
    """Returns a hash that is the same in every process, unlike `hash`."""
    return int.from_bytes(blake3.blake3(name.encode()).digest(4), "little")
