"""Copies the kept documents into shards of a fixed number of tokens.

A split is the stream of its documents' tokens in source order; shard k starts at token k times the
shard size. The task of a shard reads only the few blocks that the shard overlaps.
"""

from collections.abc import Mapping, Sequence

import blake3
import msgspec
import numpy as np
import numpy.typing as npt

from paceline.data.manifest import (
    DOCUMENT_END_DTYPE,
    SPLITS,
    ShardEntry,
    SplitName,
    documents_name,
    tokens_name,
)
from paceline.data.prepare.duplicates import kept_rows, read_table
from paceline.data.prepare.job import Job, is_heldout, once, plan_name


class ShardTask(msgspec.Struct, frozen=True, kw_only=True):
    """A shard to write."""

    job: Job
    plan_id: str
    split: SplitName
    shard: int
    num_tokens: int
    first_block: int
    """The first block that the shard overlaps."""
    num_skipped: int
    """Tokens of that block that belong to earlier shards."""

    @property
    def label(self) -> str:
        """Name of the task in error messages."""
        return tokens_name(self.split, self.shard)


def plan_shards(
    job: Job, plan_id: str, kept_tokens: Mapping[SplitName, Sequence[int]]
) -> list[ShardTask]:
    """Returns the tasks of all shards, given the number of kept tokens of each block."""
    tasks = []
    for split in SPLITS:
        ends = np.cumsum(np.array(kept_tokens[split], np.int64))
        total = int(ends[-1]) if len(ends) else 0
        for shard, start in enumerate(range(0, total, job.shard_tokens)):
            first_block = int(np.searchsorted(ends, start, side="right"))
            before = int(ends[first_block - 1]) if first_block else 0
            tasks.append(
                ShardTask(
                    job=job,
                    plan_id=plan_id,
                    split=split,
                    shard=shard,
                    num_tokens=min(job.shard_tokens, total - start),
                    first_block=first_block,
                    num_skipped=start - before,
                )
            )
    return tasks


def write_shard(task: ShardTask) -> ShardEntry:
    """Writes a shard's tokens and document ends and then its marker, unless the marker exists."""
    marker = plan_name(task.plan_id, f"shards/{task.split}-{task.shard:08d}.json")
    return once(task.job, marker, ShardEntry, lambda: _write_files(task))


def _write_files(task: ShardTask) -> ShardEntry:
    shard_tokens = np.empty(task.num_tokens, task.job.tokenizer().dtype)
    shard_ends = []
    block = task.first_block
    at = -task.num_skipped  # Start of the block in the shard.
    while at < task.num_tokens:
        tokens, ends = _kept(task, block)
        start, end = max(at, 0), min(at + len(tokens), task.num_tokens)
        shard_tokens[start:end] = tokens[start - at : end - at]
        ends = ends + at
        shard_ends.append(ends[(ends > 0) & (ends <= task.num_tokens)])
        at += len(tokens)
        block += 1
    documents = np.concatenate(shard_ends).astype(DOCUMENT_END_DTYPE).tobytes()
    content = shard_tokens.view(np.uint8).data
    storage = task.job.storage()
    storage.write(tokens_name(task.split, task.shard), content)
    storage.write(documents_name(task.split, task.shard), documents)
    return ShardEntry(
        num_tokens=task.num_tokens,
        num_documents=len(documents) // 4,
        tokens_blake3=blake3.blake3(content).hexdigest(),
        documents_blake3=blake3.blake3(documents).hexdigest(),
    )


def _kept(
    task: ShardTask, block: int
) -> tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.int64]]:
    """Returns the tokens of a block's kept documents, and the end of each document."""
    files = read_table(task.job, task.plan_id).block_files(task.job, block)
    rows = files.rows()
    kept = kept_rows(task.job, task.plan_id, block, rows)
    is_here = is_heldout(rows, task.job) == (task.split == "heldout")
    kept, lengths = kept[is_here], rows["num_tokens"][is_here].astype(np.int64)
    if not kept.any():
        return np.empty(0, np.uint16), np.empty(0, np.int64)
    tokens = files.tokens(task.split)
    if not kept.all():
        tokens = tokens[np.repeat(kept, lengths)]
    return tokens, np.cumsum(lengths[kept])
