"""Checkpoints in host memory: files on a tmpfs, which outlive the process that wrote them.

A run has one directory per host, private to its user and named after the run. Every rank writes its
own files there, and replicas of the files that a rank of another host sends. Each host publishes
its part with a rename, once all ranks have written theirs.

Blocks that a host does not hold come from ranks on other hosts. Before reading, each rank announces
the blocks that it needs and lacks. Ranks that hold them send exactly these blocks. Received blocks
are verified against their digests like all others.
"""

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterable

import blake3
import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from paceline.checkpoint.catalog import Checkpoint
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.format import Manifest, block_range
from paceline.checkpoint.restore import CheckpointReader
from paceline.checkpoint.storage import DirectoryStorage, file_errors, shared_lock
from paceline.core.errors import TruncatedError
from paceline.core.files import create_atomically
from paceline.data.storage import LocalStorage
from paceline.parallel.ranks.collectives import from_all

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


_MESSAGE_BYTES = 2**26


class Messages:
    """Messages in flight, of bounded size; between two ranks they arrive in order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._under_way: list[tuple[dist.Work | None, Tensor]] = []

    def send(self, content: Tensor, rank: int) -> None:
        """Starts to send bytes, which must not change until `wait` returns."""
        self._start(content, lambda part: dist.isend(part, group=self._group, group_dst=rank))

    def receive(self, room: Tensor, rank: int) -> None:
        """Starts to receive as many bytes as `room` holds."""
        self._start(room, lambda part: dist.irecv(part, group=self._group, group_src=rank))

    def wait(self) -> None:
        """Waits until all messages have arrived."""
        for work, _ in self._under_way:
            if work is not None:
                work.wait()
        self._under_way.clear()

    def _start(self, content: Tensor, start: Callable[[Tensor], dist.Work | None]) -> None:
        assert content.dtype == torch.uint8
        for part in torch.split(content, _MESSAGE_BYTES):
            self._under_way.append((start(part), part))


Range = tuple[str, int, int]
"""File name, first byte, and the byte after the last."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaMap:
    """Ranks that can send each file of a checkpoint, because their hosts hold it in memory."""

    rank: int
    by_file: dict[str, list[int]]
    """Ranks by the file that their hosts hold."""

    def sender(self, file: str, to: int) -> int:
        """Returns the rank that sends a file's bytes to another rank; several share the work."""
        senders = self.by_file[file]
        return senders[to % len(senders)]

    def has(self, file: str) -> bool:
        """Returns whether this rank's host holds a file."""
        return self.rank in self.by_file[file]


class MemoryFiles(LocalStorage):
    """Files of a step that this host holds, and blocks of others received from other hosts."""

    def __init__(self, location: MemoryStorage, step: int, *, prefer_replica: bool) -> None:
        super().__init__(location.storage(step).directory)
        self._location = location
        self._step = step
        self._prefer_replica = prefer_replica
        self.received: dict[Range, bytes] = {}

    def path(self, name: str) -> pathlib.Path:
        """Returns the path of the preferred copy of a file."""
        copies = [
            self._location.file_path(self._step, name, is_replica=is_replica)
            for is_replica in (self._prefer_replica, not self._prefer_replica)
        ]
        return next((path for path in copies if path.is_file()), super().path(name))

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Returns bytes that were received, or reads them on this host."""
        received = self.received.get((name, start, end))
        return super().read_range(name, start, end) if received is None else received


class MemoryReader(CheckpointReader):
    """Reads a checkpoint that is held in the memory of several hosts."""

    def __init__(
        self,
        files: MemoryFiles,
        manifest: Manifest,
        replica_map: ReplicaMap,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.checkpoint = Checkpoint(step=manifest.step, storage=files, manifest=manifest)
        super().__init__(self.checkpoint)
        self._files = files
        self._replica_map = replica_map
        self._group = group
        self.received_bytes = 0
        """Bytes received from other hosts so far."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the items of a plan, after all ranks have exchanged the blocks that they lack."""
        self._files.received = self._receive(self._lacking(plan))
        try:
            return super().read_data(plan, planner)
        finally:
            self._files.received = {}

    def verifies(self, number: int, file: int, rank: int, world_size: int) -> bool:
        """Returns whether a rank verifies an item: the first rank that holds the file does."""
        return self._replica_map.by_file[self._manifest.files[file].name][0] == rank

    def _lacking(self, plan: LoadPlan) -> list[Range]:
        """Returns the blocks that a plan needs and this host does not hold."""
        found: dict[Range, None] = {}
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                continue
            stored = self._stored[item.storage_index]
            name = self._manifest.files[stored.chunk.file].name
            if not self._replica_map.has(name):
                for block in self._blocks(item)[1]:
                    span = block_range(self._manifest, stored.name, stored.chunk, block)
                    found[(name, *span)] = None
        return list(found)

    def _receive(self, lacking: list[Range]) -> dict[Range, bytes]:
        """Returns the blocks that this rank lacks, and sends other ranks those that they lack."""
        if self._group is None:
            return {}
        messages = Messages(self._group)
        rooms: dict[Range, torch.Tensor] = {}
        for rank, ranges in enumerate(from_all(lacking, self._group)):
            for each in ranges:
                sender = self._replica_map.sender(each[0], rank)
                if rank == self._replica_map.rank:
                    rooms[each] = torch.empty(each[2] - each[1], dtype=torch.uint8)
                    messages.receive(rooms[each], sender)
                    self.received_bytes += each[2] - each[1]
                elif sender == self._replica_map.rank:
                    messages.send(self._own(each), rank)
        messages.wait()
        return {each: room.numpy().tobytes() for each, room in rooms.items()}

    def _own(self, wanted: Range) -> torch.Tensor:
        """Returns bytes to send; if unreadable, zeros, which fail the digest check."""
        name, start, end = wanted
        content = bytearray(end - start)
        with contextlib.suppress(OSError, TruncatedError):
            content[:] = self._files.read_range(name, start, end)
        return torch.frombuffer(content, dtype=torch.uint8)
