"""The table of all blocks in source order, in which later tasks look up their blocks."""

import bisect
import functools
from collections.abc import Iterator, Sequence

import msgspec

from paceline.data.prepare.blocks import BlockFiles, PieceResult
from paceline.data.prepare.job import Job, digest, plan_name
from paceline.data.prepare.tokenize import PieceTask
from paceline.data.sources.files import FoundFile

_NAME = "blocks.json"


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

    def all_block_files(self, job: Job) -> Iterator[BlockFiles]:
        """Yields the files of every block in order."""
        for block in range(self.num_blocks):
            yield self.block_files(job, block)

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
    job.storage().write(plan_name(plan_id, _NAME), msgspec.json.encode(table))
    return plan_id


@functools.lru_cache(maxsize=1)
def read_table(job: Job, plan_id: str) -> BlockTable:
    """Reads the table of all blocks, once per process."""
    return msgspec.json.decode(job.storage().read(plan_name(plan_id, _NAME)), type=BlockTable)
