"""Loading from memory: what this host does not hold comes from a rank whose host does.

Before a rank reads, it says which blocks it needs and lacks; those that hold them send it these
blocks and nothing else. They are compared with their digests like all others when they are read.
"""

import contextlib
import dataclasses
import pathlib

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from paceline.core.errors import TruncatedError
from paceline.data.storage.local import LocalStorage
from paceline.training.checkpoint.agreement import from_all
from paceline.training.checkpoint.catalog import Checkpoint
from paceline.training.checkpoint.format.blocks import block_range
from paceline.training.checkpoint.format.manifest import Manifest
from paceline.training.checkpoint.memory.messages import Messages
from paceline.training.checkpoint.places.memory import MemoryPlace
from paceline.training.checkpoint.torch_storage.reader import CheckpointReader

Range = tuple[str, int, int]
"""A file, its first byte that is meant, and the one after the last."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holders:
    """Who has which file of a checkpoint in memory, and may be asked for it."""

    rank: int
    by_file: dict[str, list[int]]
    """Ranks by the file that their hosts hold."""

    def sender(self, file: str, to: int) -> int:
        """Returns who sends a file's bytes to a rank; several share the work."""
        senders = self.by_file[file]
        return senders[to % len(senders)]

    def has(self, file: str) -> bool:
        """Whether this rank's host holds a file."""
        return self.rank in self.by_file[file]


class HeldFiles(LocalStorage):
    """The files of a step that this host holds, and what others have sent of the rest.

    Args:
        place: The memory of this host.
        step: A published step.
        prefer_replica: Which of two copies to read.
    """

    def __init__(self, place: MemoryPlace, step: int, *, prefer_replica: bool) -> None:
        super().__init__(place.storage(step).directory)
        self._place = place
        self._step = step
        self._prefer_replica = prefer_replica
        self.received: dict[Range, bytes] = {}

    def path(self, name: str) -> pathlib.Path:
        """Returns where the preferred copy of a file is."""
        copies = [
            self._place.held_file(self._step, name, is_replica=is_replica)
            for is_replica in (self._prefer_replica, not self._prefer_replica)
        ]
        return next((path for path in copies if path.is_file()), super().path(name))

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Returns bytes that were received, or those of this host."""
        received = self.received.get((name, start, end))
        return super().read_range(name, start, end) if received is None else received


class HeldReader(CheckpointReader):
    """Reads a checkpoint that is in the memory of several hosts.

    Args:
        files: Those that this host holds.
        manifest: Of the whole.
        holders: Who has the others.
        group: All ranks; None for a rank alone.
    """

    def __init__(
        self,
        files: HeldFiles,
        manifest: Manifest,
        holders: Holders,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.checkpoint = Checkpoint(step=manifest.step, storage=files, manifest=manifest)
        super().__init__(self.checkpoint)
        self._files = files
        self._holders = holders
        self._group = group
        self.received_bytes = 0
        """What came from other hosts so far."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the plan asks for, after all ranks have what their plans ask for."""
        self._files.received = self._receive(self._lacking(plan))
        try:
            return super().read_data(plan, planner)
        finally:
            self._files.received = {}

    def verifies(self, number: int, file: int, rank: int, world_size: int) -> bool:
        """Whether a rank reads what nobody needed: the first that holds the file."""
        return self._holders.by_file[self._manifest.files[file].name][0] == rank

    def _lacking(self, plan: LoadPlan) -> list[Range]:
        """Returns the blocks that a plan needs and this host does not hold."""
        found: dict[Range, None] = {}
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                continue
            stored = self._stored[item.storage_index]
            name = self._manifest.files[stored.chunk.file].name
            if not self._holders.has(name):
                for block in self._blocks(item)[1]:
                    span = block_range(self._manifest, stored.name, stored.chunk, block)
                    found[(name, *span)] = None
        return list(found)

    def _receive(self, lacking: list[Range]) -> dict[Range, bytes]:
        """Returns the blocks that this rank lacks, and sends others what they lack."""
        if self._group is None:
            return {}
        messages = Messages(self._group)
        rooms: dict[Range, torch.Tensor] = {}
        for rank, ranges in enumerate(from_all(lacking, self._group)):
            for each in ranges:
                sender = self._holders.sender(each[0], rank)
                if rank == self._holders.rank:
                    rooms[each] = torch.empty(each[2] - each[1], dtype=torch.uint8)
                    messages.receive(rooms[each], sender)
                    self.received_bytes += each[2] - each[1]
                elif sender == self._holders.rank:
                    messages.send(self._own(each), rank)
        messages.wait()
        return {each: room.numpy().tobytes() for each, room in rooms.items()}

    def _own(self, wanted: Range) -> torch.Tensor:
        """Returns bytes to send; where they cannot be read, others, which have the wrong digest."""
        name, start, end = wanted
        content = bytearray(end - start)
        with contextlib.suppress(OSError, TruncatedError):
            content[:] = self._files.read_range(name, start, end)
        return torch.frombuffer(content, dtype=torch.uint8)
