"""Loads the newest intact checkpoint, the same one on all ranks, and verifies what it reads.

The storage reader for torch.distributed.checkpoint reads the blocks that contain what a rank needs,
and rejects any block with a wrong digest. `verify_rest` also reads the blocks that no rank needed,
divided over the ranks: a partially intact checkpoint is damaged.
"""

import contextlib
import dataclasses
import functools
import io
import json
import math
import os
from collections.abc import Callable
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
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from paceline.checkpoint.catalog import Checkpoint, open_checkpoint
from paceline.checkpoint.dcp import JsonLoadPlanner, dtype_of, named_failures
from paceline.checkpoint.errors import CheckpointError, DamagedCheckpointError
from paceline.checkpoint.format import (
    ITEM_BYTES,
    ChunkEntry,
    Json,
    Manifest,
    read_block,
    verify_header,
)
from paceline.checkpoint.storage import CheckpointStorage, open_checkpoints
from paceline.core.finding import Finding
from paceline.parallel.ranks.collectives import from_first, host_side_device, resolve_group


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """A loaded checkpoint, and the damaged ones that were skipped."""

    step: int
    identity: Json
    """Metadata of the run."""
    ranks: list[Json]
    """Metadata of each rank that saved."""
    passed_over: list[Finding]
    """Newer, damaged checkpoints."""


class Source:
    """A checkpoint to load from, with a reader if its files alone are not sufficient."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        group: dist.ProcessGroup | None = None,
        reader: "CheckpointReader | None" = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.reader = CheckpointReader(checkpoint) if reader is None else reader
        self.group = group

    def load(self, state: dict[str, Any]) -> None:
        """Fills the tensors of a state in place, and replaces its other values.

        The state is the saved one or a part of it, distributed in any way. All ranks must call it.
        If it raises, the state is partially filled.
        """
        with named_failures(f"loading {self.checkpoint.storage.url}"):
            load_state(
                state,
                storage_reader=self.reader,
                planner=JsonLoadPlanner(),
                process_group=self.group,
            )


def load_newest_valid(
    where: str | os.PathLike[str],
    load: Callable[[Source], None],
    group: dist.ProcessGroup | None = None,
) -> Restored | None:
    """Loads the newest checkpoint in which every byte is intact; returns None if there is none.

    A damaged checkpoint is set aside, so that the run can save that step again, and the next older
    one is tried. Raises if all are damaged: the user must decide whether to start over.

    Args:
        where: A directory that all ranks share, or ``s3://bucket/prefix``.
        load: Loads what it needs from a source, the same on all ranks; called again after a
            failure.
        group: Process group of the ranks; all ranks by default.
    """
    location = open_checkpoints(where)

    def quarantine(step: int) -> None:
        with contextlib.suppress(CheckpointError):  # If nothing may be written there, it stays.
            location.quarantine(step, os.urandom(4).hex())

    passed_over: list[Finding] = []
    for step in from_first(location.steps, group):
        try:
            manifest = load_step(location, step, load, group)
        except DamagedCheckpointError as error:
            passed_over.append(Finding(name="damaged", message=str(error)))
            from_first(functools.partial(quarantine, step), group)
            continue
        return restored_from(manifest, passed_over)
    if passed_over:
        raise CheckpointError(
            f"{location.url}: none of {len(passed_over)} checkpoints is intact; the newest: "
            f"{passed_over[0].message}"
        )
    return None


def load_step(
    where: str | os.PathLike[str] | CheckpointStorage,
    step: int,
    load: Callable[["Source"], None],
    group: dist.ProcessGroup | None = None,
) -> Manifest:
    """Loads one checkpoint, in which every byte must be intact; returns its manifest.

    Arguments are those of `load_newest_valid`.
    """
    location = open_checkpoints(where) if isinstance(where, (str, os.PathLike)) else where
    source = Source(from_first(functools.partial(open_checkpoint, location, step), group), group)
    load(source)
    source.reader.verify_rest(group)
    return source.checkpoint.manifest


def restored_from(manifest: Manifest, passed_over: list[Finding]) -> Restored:
    """Returns the metadata of a checkpoint whose state was loaded."""
    return Restored(
        step=manifest.step,
        identity=json.loads(bytes(manifest.identity)),
        ranks=[json.loads(bytes(one)) for one in manifest.ranks],
        passed_over=passed_over,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stored:
    """A chunk, and the index of its first block among all blocks of the checkpoint."""

    name: str
    chunk: ChunkEntry
    first_block: int


class CheckpointReader(StorageReader):
    """Reads one checkpoint, any number of times."""

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
        """Verifies what no rank has read, divided over the ranks; if any is damaged, all raise."""
        is_distributed = dist.is_initialized()
        rank = dist.get_rank(group) if is_distributed else 0
        world_size = dist.get_world_size(group) if is_distributed else 1
        if is_distributed:
            everywhere = self._is_verified.to(host_side_device(resolve_group(group)))
            dist.all_reduce(everywhere, dist.ReduceOp.MAX, group=group)
            self._is_verified.copy_(everywhere)
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

        `number` is the item's index among all of its kind, and `file` that of the file that has it.
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
        content = bytearray()
        for block in blocks:
            content += read_block(self._storage, self._manifest, stored.name, chunk, block)
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
