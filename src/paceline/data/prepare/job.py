"""The settings that all tasks of a preparation share, and the intermediate files between them.

All intermediate files are below `WORK`. Each is written atomically, and a task writes its marker
last: a task whose marker exists is not run again.

A tokenized piece is a sequence of blocks, each small enough to hold in memory. A block has the
tokens of its documents by split, in order; one row per document; and the hashes of its documents,
sorted, with an index by their highest byte, so that a search for duplicates reads only its own
range.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import blake3
import msgspec
import numpy as np
import numpy.typing as npt

from paceline.core.errors import DataError
from paceline.data.documents import ReadOptions
from paceline.data.manifest import SPLITS, TOKENIZER, Dropped, SplitName
from paceline.data.prepare.config import SourceConfig
from paceline.data.storage import Storage, open_storage
from paceline.data.tokenizer import Tokenizer

WORK = "_work"
_LAYOUT = 1
"""Version of the intermediate files; changing it prevents the reuse of older ones."""


Result = TypeVar("Result")


class Task(Protocol):
    """A unit of work for a worker."""

    @property
    def label(self) -> str:
        """Name of the task in error messages."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a preparation."""

    out: str
    """Location of the shards: an absolute path or a URL."""
    reading: ReadOptions
    tokenizer_blake3: str
    end_of_document: str | None
    heldout: float
    shard_tokens: int

    @property
    def heldout_below(self) -> int:
        """Upper bound of the first 8 hash bytes, little-endian, of held-out documents."""
        return int(self.heldout * 2**64)

    def storage(self) -> Storage:
        """Opens the storage for the shards."""
        return open_storage(self.out)

    def tokenizer(self) -> Tokenizer:
        """Loads the tokenizer, once per process."""
        return _load(self.out, self.tokenizer_blake3, self.end_of_document)


def once(job: Job, marker: str, result_type: type[Result], run: Callable[[], Result]) -> Result:
    """Returns the result in a marker; if there is none, runs the task and then writes it."""
    storage = job.storage()
    with contextlib.suppress(FileNotFoundError):
        return msgspec.json.decode(storage.read(marker), type=result_type)
    result = run()
    storage.write(marker, msgspec.json.encode(result))
    return result


def digest(*values: object) -> str:
    """Returns a digest of values, in 32 hexadecimal characters."""
    return blake3.blake3(msgspec.json.encode((_LAYOUT, *values))).hexdigest(length=16)


def piece_name(piece_id: str, what: str) -> str:
    """Returns the name of a file of a piece."""
    return f"{WORK}/pieces/{piece_id}/{what}"


def block_name(piece_id: str, block: int, what: str) -> str:
    """Returns the name of a file of a piece's block."""
    return piece_name(piece_id, f"{block:06d}.{what}")


def block_tokens(split: SplitName) -> str:
    """Returns the suffix of a block's token file of a split."""
    return f"{split}.tokens"


def plan_name(plan_id: str, what: str) -> str:
    """Returns the name of a file of a plan, which stands for one exact set of pieces."""
    return f"{WORK}/plans/{plan_id}/{what}"


@functools.lru_cache(maxsize=1)
def _load(out: str, tokenizer_blake3: str, end_of_document: str | None) -> Tokenizer:
    where = f"{out}/{TOKENIZER}"
    tokenizer = Tokenizer(open_storage(out).read(TOKENIZER).decode(), end_of_document, where)
    if tokenizer.blake3 != tokenizer_blake3:
        raise DataError(
            f"{where} is not the tokenizer that this command started with; is another paceline "
            "data prepare writing to the same place? Run this command again when the other one "
            "has finished"
        )
    return tokenizer


def reading_options(config: SourceConfig) -> ReadOptions:
    """Returns the options that determine the documents of a file."""
    return ReadOptions(
        separator=config.separator_bytes,
        field=config.field,
        max_document_bytes=config.max_document_bytes,
    )


BLOCK_TOKENS = 2**24
BLOCK_DOCUMENTS = 2**20
MOST_EXAMPLES = 5
NUM_BUCKETS = 256
"""Number of values of a hash's highest byte."""

DOCUMENT = np.dtype(
    [("hash", "<u8", 2), ("location", "<u8"), ("num_tokens", "<u4"), ("num_bytes", "<u4")]
)
"""A document's row. `location` is the number of its span (16 bits) and where it is there (48)."""
HASH = np.dtype([("hash", "<u8", 2), ("index", "<u4")])
_LOCATION_BITS = 48

Rows = npt.NDArray[Any]


class BlockCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of a block."""

    num_documents: dict[SplitName, int]
    num_tokens: dict[SplitName, int]
    num_bytes: int
    """Bytes of its documents before tokenization."""


class PieceResult(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of a piece; also the marker that the piece is finished."""

    blocks: tuple[BlockCounts, ...]
    dropped: dict[str, Dropped]


class BlockFiles(NamedTuple):
    """Reads the files of one block."""

    job: Job
    piece_id: str
    block: int

    def rows(self) -> Rows:
        """Returns the rows of the documents."""
        return np.frombuffer(self._read("documents"), DOCUMENT)

    def hashes(self, first_bucket: int, end_bucket: int) -> Rows:
        """Returns the sorted hashes whose highest byte is in a range."""
        name = block_name(self.piece_id, self.block, "hashes")
        storage = self.job.storage()
        index_bytes = 4 * (NUM_BUCKETS + 1)
        index = np.frombuffer(storage.read_range(name, 0, index_bytes), "<u4")
        start, end = int(index[first_bucket]), int(index[end_bucket])
        if start == end:
            return np.empty(0, HASH)
        start, end = (index_bytes + each * HASH.itemsize for each in (start, end))
        return np.frombuffer(storage.read_range(name, start, end), HASH)

    def tokens(self, split: SplitName) -> npt.NDArray[np.unsignedinteger]:
        """Returns the tokens of the documents in a split."""
        content = self._read(block_tokens(split))
        return np.frombuffer(content, self.job.tokenizer().dtype)

    def _read(self, what: str) -> bytes:
        return self.job.storage().read(block_name(self.piece_id, self.block, what))


def write_block(
    job: Job,
    piece_id: str,
    block: int,
    rows: Rows,
    tokens: Mapping[SplitName, list[npt.NDArray[np.unsignedinteger]]],
) -> BlockCounts:
    """Writes the files of a block."""
    storage = job.storage()
    heldout = is_heldout(rows, job)
    num_documents: dict[SplitName, int] = {
        "train": int(np.count_nonzero(~heldout)),
        "heldout": int(np.count_nonzero(heldout)),
    }
    num_tokens: dict[SplitName, int] = {}
    for split in SPLITS:
        joined = np.concatenate(tokens[split]) if tokens[split] else np.empty(0, np.uint16)
        num_tokens[split] = len(joined)
        if len(joined):
            storage.write(
                block_name(piece_id, block, block_tokens(split)), joined.view(np.uint8).data
            )
    storage.write(block_name(piece_id, block, "documents"), rows.tobytes())
    storage.write(block_name(piece_id, block, "hashes"), _sorted_hashes(rows))
    return BlockCounts(
        num_documents=num_documents,
        num_tokens=num_tokens,
        num_bytes=int(rows["num_bytes"].sum(dtype=np.int64)),
    )


def is_heldout(rows: Rows, job: Job) -> npt.NDArray[np.bool_]:
    """Returns a mask of the held-out documents, which depends only on their hashes."""
    return np.asarray(rows["hash"][:, 0] < np.uint64(job.heldout_below))


def pack_location(span: int, location: int) -> int:
    """Packs the span number and the location of a document into one integer."""
    return span << _LOCATION_BITS | location


def unpack_location(packed: int) -> tuple[int, int]:
    """Returns the span number and the location of a packed integer."""
    return packed >> _LOCATION_BITS, packed & ((1 << _LOCATION_BITS) - 1)


def merge_dropped(parts: Iterable[Mapping[str, Dropped]]) -> dict[str, Dropped]:
    """Merges the dropped documents of several tasks; keeps the first examples."""
    merged: dict[str, Dropped] = {}
    for part in parts:
        for reason, more in part.items():
            before = merged.get(reason, Dropped(num_documents=0, num_bytes=0, examples=[]))
            merged[reason] = Dropped(
                num_documents=before.num_documents + more.num_documents,
                num_bytes=before.num_bytes + more.num_bytes,
                examples=[*before.examples, *more.examples][:MOST_EXAMPLES],
            )
    return dict(sorted(merged.items()))


def _sorted_hashes(rows: Rows) -> bytes:
    high, low = rows["hash"][:, 0], rows["hash"][:, 1]
    order = np.lexsort((low, high))  # Stable: the first of equal documents stays first.
    hashes = np.empty(len(rows), HASH)
    hashes["hash"] = rows["hash"][order]
    hashes["index"] = order
    buckets = (high >> np.uint64(56)).astype(np.int64)
    index = np.zeros(NUM_BUCKETS + 1, "<u4")
    index[1:] = np.cumsum(np.bincount(buckets, minlength=NUM_BUCKETS))
    return index.tobytes() + hashes.tobytes()
