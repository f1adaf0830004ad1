"""Loads from host memory; blocks that this host does not hold come from ranks on other hosts.

Before reading, each rank announces the blocks that it needs and lacks. Ranks that hold them send
exactly these blocks. Received blocks are verified against their digests like all others.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from paceline.checkpoint.catalog import Checkpoint
from paceline.checkpoint.format import Manifest, block_range
from paceline.checkpoint.memory_storage import MemoryStorage
from paceline.checkpoint.restore import CheckpointReader
from paceline.core.errors import TruncatedError
from paceline.data.storage import LocalStorage
from paceline.parallel.ranks.collectives import from_all

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
