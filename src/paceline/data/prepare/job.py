"""The settings that all tasks of a preparation share, and the names of intermediate files.

All intermediate files are below `WORK`. Each file is written atomically, and a task writes its
marker last: a task whose marker exists is not run again.
"""

import functools
from typing import Protocol

import blake3
import msgspec

from paceline.core.errors import DataError
from paceline.data.format.manifest import TOKENIZER, SplitName
from paceline.data.sources.read import ReadOptions
from paceline.data.storage import Storage, open_storage
from paceline.data.tokenizer import Tokenizer

WORK = "_work"
_LAYOUT = 1
"""Version of the intermediate files; changing it prevents the reuse of older ones."""


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
