"""Removes exact duplicates: of equal documents, the first in source order is kept.

A partition is a range of hashes, so equal documents are always in the same partition, and a
partition is small enough to sort in memory. The results are then regrouped by block: each group of
blocks collects from all partitions which of its documents are dropped. Tasks look up their blocks
in a table of all blocks in source order.
"""

import bisect
import contextlib
import functools
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.data.documents import DUPLICATE, describe_location
from paceline.data.manifest import SPLITS, Dropped, SplitName
from paceline.data.prepare.job import (
    DOCUMENT,
    MOST_EXAMPLES,
    NUM_BUCKETS,
    BlockCounts,
    BlockFiles,
    Job,
    PieceResult,
    Rows,
    digest,
    is_heldout,
    once,
    plan_name,
    unpack_location,
)
from paceline.data.prepare.tokenize import PieceTask
from paceline.data.source_files import FoundFile

_TABLE = "blocks.json"
GROUP_BLOCKS = 256
_PARTITION_DOCUMENTS = 2**25


class BlockTable(msgspec.Struct, frozen=True, kw_only=True):
    """All blocks of a plan; blocks are numbered in source order."""

    piece_ids: tuple[str, ...]
    first_blocks: tuple[int, ...]
    """The number of the first block of each piece."""
    num_blocks: int
    files: tuple[FoundFile, ...]
    span_files: tuple[tuple[int, ...], ...]
    """The number of the file of each span of each piece."""

    def block_files(self, job: Job, block: int) -> BlockFiles:
        """Returns the files of a block."""
        piece = self._piece(block)
        return BlockFiles(job, self.piece_ids[piece], block - self.first_blocks[piece])

    def source_file(self, block: int, span: int) -> FoundFile:
        """Returns the file that a span of a block's piece was read from."""
        return self.files[self.span_files[self._piece(block)][span]]

    def _piece(self, block: int) -> int:
        # The last piece that starts at the block: pieces without documents have no blocks.
        return bisect.bisect_right(self.first_blocks, block) - 1


def write_table(job: Job, tasks: Sequence[PieceTask], results: Sequence[PieceResult]) -> str:
    """Writes the table of all blocks; returns the id of its plan."""
    piece_ids = tuple(task.piece_id for task in tasks)
    first_blocks = []
    num_blocks = 0
    numbers: dict[FoundFile, int] = {}
    span_files = []
    for task, result in zip(tasks, results, strict=True):
        first_blocks.append(num_blocks)
        num_blocks += len(result.blocks)
        span_files.append(
            tuple(numbers.setdefault(span.file, len(numbers)) for span in task.piece.spans)
        )
    table = BlockTable(
        piece_ids=piece_ids,
        first_blocks=tuple(first_blocks),
        num_blocks=num_blocks,
        files=tuple(numbers),
        span_files=tuple(span_files),
    )
    plan_id = digest(piece_ids, job.shard_tokens)
    job.storage().write(plan_name(plan_id, _TABLE), msgspec.json.encode(table))
    return plan_id


@functools.lru_cache(maxsize=1)
def read_table(job: Job, plan_id: str) -> BlockTable:
    """Reads the table of all blocks, once per process."""
    return msgspec.json.decode(job.storage().read(plan_name(plan_id, _TABLE)), type=BlockTable)


class DuplicatesTask(msgspec.Struct, frozen=True, kw_only=True):
    """A partition to search for duplicates, or a group of blocks whose duplicates are collected."""

    job: Job
    plan_id: str
    number: int
    """Number of the partition or the group."""
    num_partitions: int
    label: str
    """Name of the task in error messages."""


class GroupResult(msgspec.Struct, frozen=True, kw_only=True):
    """The duplicates in the blocks of a group; also the marker that the group is finished."""

    dropped_documents: dict[SplitName, list[int]]
    """Number of dropped documents, by split and block."""
    dropped_tokens: dict[SplitName, list[int]]
    """Number of their tokens, by split and block."""
    dropped: dict[str, Dropped]


def num_partitions(num_documents: int) -> int:
    """Returns the number of partitions for this many documents."""
    partitions = 1
    while partitions < NUM_BUCKETS and num_documents > partitions * _PARTITION_DOCUMENTS:
        partitions *= 2
    return partitions


def plan_duplicates(
    job: Job, plan_id: str, blocks: Sequence[BlockCounts]
) -> tuple[list[DuplicatesTask], list[DuplicatesTask]]:
    """Returns the tasks for `find_duplicates`, and those for `gather_duplicates` after them."""
    partitions = num_partitions(sum(sum(block.num_documents.values()) for block in blocks))

    def tasks(labels: Iterable[str]) -> list[DuplicatesTask]:
        return [
            DuplicatesTask(
                job=job, plan_id=plan_id, number=number, num_partitions=partitions, label=label
            )
            for number, label in enumerate(labels)
        ]

    firsts = range(0, len(blocks), GROUP_BLOCKS)
    return (
        tasks(f"duplicates, partition {each} of {partitions}" for each in range(partitions)),
        tasks(f"duplicates of block {first} and following" for first in firsts),
    )


def _num_groups(num_blocks: int) -> int:
    return -(-num_blocks // GROUP_BLOCKS)


def find_duplicates(task: DuplicatesTask) -> None:
    """Writes the duplicates of a partition: an index by group, then block and row of each."""
    storage = task.job.storage()
    name = _partition_name(task.plan_id, task.number)
    with contextlib.suppress(FileNotFoundError):
        storage.read_range(name, 0, 8)
        return  # It is finished.
    table = read_table(task.job, task.plan_id)
    buckets = NUM_BUCKETS // task.num_partitions
    first = task.number * buckets
    hashes, keys = [], []
    for block in range(table.num_blocks):
        found = table.block_files(task.job, block).hashes(first, first + buckets)
        hashes.append(found["hash"])
        keys.append(np.uint64(block << 32) | found["index"].astype(np.uint64))
    going = np.empty(0, np.uint64)
    if hashes:
        joined = np.concatenate(hashes)
        # The sort is stable and blocks are in source order, so the first of equals stays first.
        order = np.lexsort((joined[:, 1], joined[:, 0]))
        joined = joined[order]
        is_repeated = np.zeros(len(joined), np.bool_)
        is_repeated[1:] = (joined[1:] == joined[:-1]).all(axis=1)
        going = np.sort(np.concatenate(keys)[order[is_repeated]])
    bounds = np.arange(_num_groups(table.num_blocks) + 1, dtype=np.uint64)
    index = np.searchsorted(going, bounds * np.uint64(GROUP_BLOCKS << 32)).astype("<u8")
    storage.write(name, index.tobytes() + going.astype("<u8").tobytes())


def gather_duplicates(task: DuplicatesTask) -> GroupResult:
    """Writes the duplicates of a group of blocks, then their counts as the marker."""
    marker = plan_name(task.plan_id, f"groups/{task.number:06d}.json")
    return once(task.job, marker, GroupResult, lambda: _gather(task))


def _gather(task: DuplicatesTask) -> GroupResult:
    storage = task.job.storage()
    table = read_table(task.job, task.plan_id)
    index_bytes = 8 * (_num_groups(table.num_blocks) + 1)
    parts = []
    for partition in range(task.num_partitions):
        name = _partition_name(task.plan_id, partition)
        at = 8 * task.number
        start, end = np.frombuffer(storage.read_range(name, at, at + 16), "<u8").tolist()
        if start < end:
            content = storage.read_range(name, index_bytes + 8 * start, index_bytes + 8 * end)
            parts.append(np.frombuffer(content, "<u8"))
    going = np.sort(np.concatenate(parts)) if parts else np.empty(0, "<u8")
    storage.write(_group_name(task.plan_id, task.number), going.tobytes())
    return _count(task, table, going)


def kept_rows(job: Job, plan_id: str, block: int, rows: Rows) -> npt.NDArray[np.bool_]:
    """Returns a mask of the documents of a block that are kept."""
    content = job.storage().read(_group_name(plan_id, block // GROUP_BLOCKS))
    kept = np.ones(len(rows), np.bool_)
    kept[_of_block(np.frombuffer(content, "<u8"), block)] = False
    return kept


def _count(task: DuplicatesTask, table: BlockTable, going: npt.NDArray[np.uint64]) -> GroupResult:
    documents: dict[SplitName, list[int]] = {split: [] for split in SPLITS}
    tokens: dict[SplitName, list[int]] = {split: [] for split in SPLITS}
    num_bytes = 0
    examples: list[str] = []
    first = task.number * GROUP_BLOCKS
    for block in range(first, min(first + GROUP_BLOCKS, table.num_blocks)):
        indices = _of_block(going, block)
        rows = np.empty(0, DOCUMENT)
        if len(indices):
            rows = table.block_files(task.job, block).rows()[indices]
        heldout = is_heldout(rows, task.job)
        for split in SPLITS:
            chosen = rows[heldout == (split == "heldout")]
            documents[split].append(len(chosen))
            tokens[split].append(int(chosen["num_tokens"].sum(dtype=np.int64)))
        num_bytes += int(rows["num_bytes"].sum(dtype=np.int64))
        for packed in rows["location"][: MOST_EXAMPLES - len(examples)].tolist():
            span, location = unpack_location(packed)
            examples.append(describe_location(table.source_file(block, span), location))
    dropped = Dropped(num_documents=len(going), num_bytes=num_bytes, examples=examples)
    return GroupResult(
        dropped_documents=documents,
        dropped_tokens=tokens,
        dropped={DUPLICATE: dropped} if len(going) else {},
    )


def _of_block(going: npt.NDArray[np.uint64], block: int) -> npt.NDArray[np.int64]:
    bounds = np.array([block << 32, (block + 1) << 32], np.uint64)
    start, end = np.searchsorted(going, bounds)
    return (going[start:end] & np.uint64(2**32 - 1)).astype(np.int64)


def _partition_name(plan_id: str, partition: int) -> str:
    return plan_name(plan_id, f"partitions/{partition:03d}")


def _group_name(plan_id: str, group: int) -> str:
    return plan_name(plan_id, f"groups/{group:06d}")
