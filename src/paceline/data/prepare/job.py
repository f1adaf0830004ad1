"""What all tasks of a preparation know, and the names of what they leave for one another.

Everything of an unfinished preparation is below `WORK`. A task's result is there whole or not at
all, and its marker is written last: a task whose marker is there is not done again.
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
"""Changes when what tasks leave behind changes, so that older remains are not taken up."""


class Task(Protocol):
    """Something for a worker to do."""

    @property
    def label(self) -> str:
        """What an error calls it."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A preparation."""

    out: str
    """Where the shards go: an absolute path, or an address."""
    reading: ReadOptions
    tokenizer_blake3: str
    end_of_document: str | None
    heldout: float
    shard_tokens: int

    @property
    def heldout_below(self) -> int:
        """A document is held out if its hash's first 8 bytes, little-endian, are below this."""
        return int(self.heldout * 2**64)

    def storage(self) -> Storage:
        """Opens the place where the shards go."""
        return open_storage(self.out)

    def tokenizer(self) -> Tokenizer:
        """Loads the tokenizer, once per process."""
        return _load(self.out, self.tokenizer_blake3, self.end_of_document)


def digest(*values: object) -> str:
    """Returns 32 characters that stand for some values."""
    return blake3.blake3(msgspec.json.encode((_LAYOUT, *values))).hexdigest(length=16)


def piece_name(piece_id: str, what: str) -> str:
    """Returns the name of a file of a piece."""
    return f"{WORK}/pieces/{piece_id}/{what}"


def block_name(piece_id: str, block: int, what: str) -> str:
    """Returns the name of a file of a piece's block."""
    return piece_name(piece_id, f"{block:06d}.{what}")


def block_tokens(split: SplitName) -> str:
    """Returns what a block's tokens of a split are called."""
    return f"{split}.tokens"


def plan_name(plan_id: str, what: str) -> str:
    """Returns the name of a file that holds for one exact set of pieces."""
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
