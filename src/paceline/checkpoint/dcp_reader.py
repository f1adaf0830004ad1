"""Loading: the storage reader for torch.distributed.checkpoint, which verifies what it reads.

A rank reads the blocks that contain what it needs, and rejects any block with a wrong digest.
`verify_rest` also reads the blocks that no rank needed, divided over the ranks: a partially intact
checkpoint is damaged.
"""

import dataclasses
import io
import math
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from paceline.checkpoint.catalog import Checkpoint
from paceline.checkpoint.dcp import dtype_of
from paceline.checkpoint.errors import DamagedCheckpointError
from paceline.checkpoint.format import ITEM_BYTES, ChunkEntry, read_block, read_chunk, verify_header


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stored:
    """A chunk, and the index of its first block among all blocks of the checkpoint."""

    name: str
    chunk: ChunkEntry
    first_block: int


class CheckpointReader(StorageReader):
    """Reads one checkpoint, any number of times.

    Args:
        checkpoint: A checkpoint with an intact manifest.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._storage = checkpoint.storage
        self._manifest = checkpoint.manifest
        self._stored: dict[MetadataIndex, _Stored] = {}
        num_blocks = 0
        for name, tensor in self._manifest.tensors.items():
            for chunk in tensor.chunks:
                index = MetadataIndex(name, chunk.offsets)
                self._stored[index] = _Stored(name=name, chunk=chunk, first_block=num_blocks)
                num_blocks += len(chunk.blake3)
        self._is_verified = torch.zeros(num_blocks, dtype=torch.uint8)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: a reader reads one checkpoint."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Returns the metadata that the planner needs."""
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=dtype_of(tensor.dtype)),
                size=torch.Size(tensor.shape),
                chunks=[
                    ChunkStorageMetadata(
                        offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.shape)
                    )
                    for chunk in tensor.chunks
                ],
            )
            for name, tensor in self._manifest.tensors.items()
        }
        entries |= dict.fromkeys(self._manifest.values, BytesStorageMetadata())
        return Metadata(state_dict_metadata=entries)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any) -> None:
        """Does nothing: the manifest is already read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the items of a plan."""
        for item in sorted(plan.items, key=self._position):
            if item.type is LoadItemType.BYTE_IO:
                text = bytes(self._manifest.values[item.storage_index.fqn])
                planner.load_bytes(item, io.BytesIO(text))
            else:
                target = planner.resolve_tensor(item).detach()
                target.copy_(self._read(item))
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns False: torch does not choose this reader by a path."""
        return False

    def verify_rest(self, group: dist.ProcessGroup | None = None) -> None:
        """Verifies what no rank has read, divided over the ranks; raises on all if any is damaged.

        Args:
            group: Process group of the ranks that loaded from this checkpoint; all must call it.
        """
        is_distributed = dist.is_initialized()
        rank = dist.get_rank(group) if is_distributed else 0
        world_size = dist.get_world_size(group) if is_distributed else 1
        if is_distributed:
            dist.all_reduce(self._is_verified, dist.ReduceOp.MAX, group=group)
        unread = [
            (stored, block)
            for stored in self._stored.values()
            for block in range(len(stored.chunk.blake3))
            if not self._is_verified[stored.first_block + block]
        ]
        problem = ""
        try:
            for file in range(len(self._manifest.files)):
                if self.verifies(file, file, rank, world_size):
                    verify_header(self._storage, self._manifest, file)
            for number, (stored, block) in enumerate(unread):
                if not self.verifies(number, stored.chunk.file, rank, world_size):
                    continue
                read_block(self._storage, self._manifest, stored.name, stored.chunk, block)
        except DamagedCheckpointError as error:
            problem = f"rank {rank}: {error}"
        problems: list[str] = [problem]
        if is_distributed:
            problems = [""] * world_size
            dist.all_gather_object(problems, problem, group=group)
        for found in filter(None, problems):
            raise DamagedCheckpointError(found)

    def verifies(self, number: int, file: int, rank: int, world_size: int) -> bool:
        """Returns whether a rank verifies an item that no rank needed.

        Args:
            number: Index of the item among all of its kind.
            file: Index of the file that contains the item.
            rank: Rank among those that load.
            world_size: Number of ranks that load.
        """
        return number % world_size == rank

    def _position(self, item: ReadItem) -> tuple[int, int]:
        """Returns the location of an item, so that files are read front to back."""
        stored = self._stored.get(item.storage_index)
        return (-1, 0) if stored is None else (stored.chunk.file, stored.chunk.start)

    def _blocks(self, item: ReadItem) -> tuple[int, range]:
        """Returns the first byte of an item in its chunk, and the blocks that contain the item."""
        stored = self._stored[item.storage_index]
        chunk = stored.chunk
        row_bytes = (
            math.prod(chunk.shape[1:]) * ITEM_BYTES[self._manifest.tensors[stored.name].dtype]
        )
        first, rows = (item.storage_offsets[0], item.lengths[0]) if chunk.shape else (0, 1)
        start, end = first * row_bytes, (first + rows) * row_bytes
        size = self._manifest.block_bytes
        return start, range(start // size, -(-end // size))

    def _read(self, item: ReadItem) -> Tensor:
        """Returns the elements that an item requests."""
        stored = self._stored[item.storage_index]
        chunk = stored.chunk
        dtype = self._manifest.tensors[stored.name].dtype
        start, blocks = self._blocks(item)
        rows = item.lengths[0] if chunk.shape else 1
        size = self._manifest.block_bytes
        content = read_chunk(self._storage, self._manifest, stored.name, chunk, blocks)
        self._is_verified[stored.first_block + blocks.start : stored.first_block + blocks.stop] = 1
        shape = [rows, *chunk.shape[1:]] if chunk.shape else []
        if not content:
            return torch.empty(list(item.lengths), dtype=dtype_of(dtype))
        elements = torch.frombuffer(
            content,
            dtype=dtype_of(dtype),
            count=math.prod(shape),
            offset=start - blocks.start * size,
        ).view(shape)
        for dimension in range(1, len(shape)):
            elements = elements.narrow(
                dimension, item.storage_offsets[dimension], item.lengths[dimension]
            )
        return elements
