"""Saving: the storage writer for torch.distributed.checkpoint, which takes digests as it writes.

Phases, as torch calls them: every rank plans what it has (`prepare_local_plan`), the first rank
divides the writes and begins the save (`prepare_global_plan`), every rank writes its own files
(`write_data`), the first rank publishes them with their manifest (`finish`). Ranks send the names,
locations and digests of what they have written to the first rank only.
"""

import dataclasses
import io
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import blake3
import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from paceline.checkpoint.dcp import bytes_of, dtype_name
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.format import (
    DEFAULT_BLOCK_BYTES,
    SCHEMA,
    ChunkEntry,
    FileEntry,
    Manifest,
    Piece,
    TensorEntry,
    block_digests,
    encode_header,
    encode_manifest,
    order_pieces,
    split_into_files,
)
from paceline.checkpoint.storage import CheckpointStorage
from paceline.devices import accelerator
from paceline.parallel.ranks.heartbeats import Writing, beat_writing


class HostBuffers:
    """Host memory for this rank's part of a checkpoint, so that training continues meanwhile.

    The buffers are allocated once and reused by every save. An accelerator's are pinned, so that it
    copies without the host.
    """

    def __init__(self) -> None:
        self._kept: dict[MetadataIndex, Tensor] = {}

    def copy(self, tensors: dict[MetadataIndex, Tensor]) -> dict[MetadataIndex, Tensor]:
        """Returns contiguous copies of tensors; overwrites those of the previous save."""
        copies: dict[MetadataIndex, Tensor] = {}
        devices: set[torch.device] = set()
        for index, tensor in tensors.items():
            copies[index] = self._room_for(index, tensor)
            copies[index].copy_(tensor, non_blocking=True)
            devices.add(tensor.device)
        for device in devices:
            accelerator.synchronize(device)
        self._kept = copies
        return copies

    def _room_for(self, index: MetadataIndex, tensor: Tensor) -> Tensor:
        kept = self._kept.get(index)
        if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            return kept
        return torch.empty(
            tensor.shape, dtype=tensor.dtype, pin_memory=accelerator.pins_memory(tensor.device)
        )


DEFAULT_FILE_BYTES = 2**29


@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingSave:
    """What to save in addition to the state, and how."""

    location: CheckpointStorage
    step: int
    identity: bytes
    """Metadata of the run as JSON; the first rank's is used."""
    of_rank: bytes
    """Metadata of this rank as JSON."""
    max_file_bytes: int = DEFAULT_FILE_BYTES
    block_bytes: int = DEFAULT_BLOCK_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Assignment:
    """Message from the first rank to each rank."""

    rank: int
    save_id: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Written:
    """Message from a rank to the first rank about an item."""

    file: FileEntry
    chunk: ChunkEntry


class CheckpointWriter(StorageWriter):
    """Writes one checkpoint."""

    def __init__(
        self,
        pending: PendingSave,
        buffers: HostBuffers | None = None,
        on_staged: Callable[[], None] = lambda: None,
    ) -> None:
        self._pending = pending
        self._buffers = buffers
        self._on_staged = on_staged
        self._save_id = ""
        self._is_coordinator = False
        self._of_ranks: list[msgspec.Raw] = []

    @property
    def save_id(self) -> str:
        """Id of the pending save, once the ranks have planned it."""
        return self._save_id

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Records whether this rank publishes."""
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Attaches this rank's metadata to its plan."""
        return dataclasses.replace(plan, storage_data=self._pending.of_rank)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begins the pending save, and gives it an id that all ranks use."""
        self._of_ranks = [msgspec.Raw(plan.storage_data) for plan in plans]
        self._save_id = os.urandom(6).hex()
        self._pending.location.begin(self._pending.step, self._save_id)
        return [
            dataclasses.replace(plan, storage_data=_Assignment(rank=rank, save_id=self._save_id))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's part: values into the results, tensors into files."""
        assignment: _Assignment = plan.storage_data
        self._save_id = assignment.save_id
        results, tensors, items = _resolve(plan.items, planner)
        if self._buffers is not None:
            tensors = self._buffers.copy(tensors)
        self._on_staged()
        beat_writing(Writing.WRITE)
        pieces = {_piece(item): index for index, item in items.items()}
        files = split_into_files(order_pieces(pieces), self._pending.max_file_bytes)
        for number, in_file in enumerate(files):
            name = f"rank-{assignment.rank:05d}-{number:05d}.safetensors"
            of_file = [(piece, pieces[piece]) for piece in in_file]
            results += self._write_file(name, assignment.rank, of_file, tensors)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publishes the checkpoint."""
        beat_writing(Writing.PUBLISH)
        manifest = self._manifest(metadata, [result for own in results for result in own])
        if self._pending.location.is_shared:
            self._require_visible(manifest.files)
        self._pending.location.publish(self._pending.step, self._save_id, encode_manifest(manifest))
        # torch would send this to all ranks, and none of them needs it.
        metadata.state_dict_metadata.clear()
        metadata.planner_data = None

    def close(self, *, failed: bool) -> None:
        """Releases the pending save, or removes it if it failed.

        The first rank removes a failed save; every rank does if the location is not shared.
        """
        beat_writing(Writing.NOTHING)
        if not self._save_id:
            return
        if failed and (self._is_coordinator or not self._pending.location.is_shared):
            self._pending.location.abandon(self._pending.step, self._save_id)
        else:
            self._pending.location.release(self._pending.step, self._save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns False: torch does not choose this writer by a path."""
        return False

    def _write_file(
        self,
        name: str,
        rank: int,
        pieces: Sequence[tuple[Piece, MetadataIndex]],
        tensors: dict[MetadataIndex, Tensor],
    ) -> list[WriteResult]:
        header = encode_header([piece for piece, _ in pieces])
        whole = blake3.blake3(header)
        digests: list[list[str]] = []

        def parts() -> Iterator[bytes | memoryview]:
            yield header
            for _, index in pieces:
                content = bytes_of(tensors[index].detach().cpu().contiguous())
                digests.append(block_digests(content, self._pending.block_bytes))
                whole.update(content)
                yield content

        published = self._pending.location.write(self._pending.step, self._save_id, name, parts())
        start = len(header)
        chunks = []
        for (piece, _), blocks in zip(pieces, digests, strict=True):
            chunks.append(
                ChunkEntry(
                    offsets=list(piece.offsets),
                    shape=list(piece.shape),
                    file=0,
                    start=start,
                    blake3=blocks,
                )
            )
            start += piece.num_bytes
        file = FileEntry(
            name=published,
            rank=rank,
            num_bytes=start,
            header_bytes=len(header),
            header_blake3=blake3.blake3(header).hexdigest(),
            blake3=whole.hexdigest(),
        )
        return [
            WriteResult(index, piece.num_bytes, _Written(file=file, chunk=chunk))
            for (piece, index), chunk in zip(pieces, chunks, strict=True)
        ]

    def _require_visible(self, files: Sequence[FileEntry]) -> None:
        """Raises if the first rank does not see a file that another rank has written."""
        location = self._pending.location
        sizes = location.sizes(self._pending.step, self._save_id)
        for file in files:
            if sizes.get(file.name) != file.num_bytes:
                raise CheckpointError(
                    f"{location.url}: the first rank cannot see {file.name}, written by rank "
                    f"{file.rank}; name a directory that all hosts share, or s3://bucket/prefix"
                )

    def _manifest(self, metadata: Metadata, results: Sequence[WriteResult]) -> Manifest:
        tensors = {
            name: TensorEntry(
                dtype=dtype_name(entry.properties.dtype, name), shape=list(entry.size), chunks=[]
            )
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        values: dict[str, msgspec.Raw] = {}
        files: dict[str, FileEntry] = {}
        numbers: dict[str, int] = {}
        for result in results:
            if isinstance(result.storage_data, bytes):
                values[result.index.fqn] = msgspec.Raw(result.storage_data)
                continue
            written: _Written = result.storage_data
            number = numbers.setdefault(written.file.name, len(numbers))
            files[written.file.name] = written.file
            chunk = msgspec.structs.replace(written.chunk, file=number)
            tensors[result.index.fqn].chunks.append(chunk)
        return Manifest(
            schema=SCHEMA,
            step=self._pending.step,
            save_id=self._save_id,
            world_size=len(self._of_ranks),
            block_bytes=self._pending.block_bytes,
            identity=msgspec.Raw(self._pending.identity),
            ranks=self._of_ranks,
            values=values,
            tensors=tensors,
            files=list(files.values()),
        )


def _resolve(
    items: Sequence[WriteItem], planner: SavePlanner
) -> tuple[list[WriteResult], dict[MetadataIndex, Tensor], dict[MetadataIndex, WriteItem]]:
    """Returns the results for values, which are final, and the tensors to write."""
    results: list[WriteResult] = []
    tensors: dict[MetadataIndex, Tensor] = {}
    by_index: dict[MetadataIndex, WriteItem] = {}
    for item in items:
        data = planner.resolve_data(item)
        if item.type is WriteItemType.BYTE_IO:
            assert isinstance(data, io.BytesIO)
            content = data.getvalue()
            results.append(WriteResult(item.index, len(content), content))
        else:
            assert isinstance(data, torch.Tensor)
            tensors[item.index] = data.detach()
            by_index[item.index] = item
    return results, tensors, by_index


def _piece(item: WriteItem) -> Piece:
    assert item.tensor_data is not None
    return Piece(
        name=item.index.fqn,
        dtype=dtype_name(item.tensor_data.properties.dtype, item.index.fqn),
        offsets=tuple(item.tensor_data.chunk.offsets),
        shape=tuple(item.tensor_data.chunk.sizes),
        full_shape=tuple(item.tensor_data.size),
    )
