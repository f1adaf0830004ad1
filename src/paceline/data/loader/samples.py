"""Samples of one split of a prepared dataset.

With a context of T tokens, sample n is the tokens [n*T, n*T + T + 1) of the split's stream: inputs
and targets, shifted by one token. A sample may cross shard boundaries. Its location is computed; no
index is read.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from paceline.core.errors import DataError
from paceline.data.format.manifest import (
    DOCUMENT_END_DTYPE,
    Manifest,
    SplitName,
    documents_name,
    tokens_name,
)
from paceline.data.loader.shard_files import ShardFiles, TokenArray
from paceline.data.sampling.permutation import IndexArray

TokenRow = npt.NDArray[np.int64]


class SplitSamples:
    """The samples of a split.

    Args:
        manifest: The dataset's manifest.
        split: The split to read.
        files: The dataset's files.
        context_length: Tokens in a sample, without the last target.
        place: The dataset's directory or URL, for error messages.
    """

    def __init__(
        self,
        manifest: Manifest,
        split: SplitName,
        files: ShardFiles,
        context_length: int,
        *,
        place: str,
    ) -> None:
        if split not in manifest.splits:
            known = ", ".join(manifest.splits)
            raise DataError(f"{place}: no split {split!r}; it has {known}")
        self.num_tokens = manifest.splits[split].num_tokens
        self.num_samples = max(0, self.num_tokens - 1) // context_length
        if not self.num_samples:
            raise DataError(
                f"{place}: split {split!r} has {self.num_tokens:,} tokens, less than one sample "
                f"of {context_length + 1:,}; use a shorter context or more text"
            )
        self.context_length = context_length
        self._dtype = manifest.stored_dtype
        self._shard_tokens = manifest.shard_tokens
        self._split: SplitName = split
        self._files = files

    def read(self, samples: IndexArray, rows: Iterable[TokenRow]) -> None:
        """Copies the tokens of `samples` to `rows`, one row of context length + 1 per sample."""
        length = self.context_length + 1
        shards, offsets = np.divmod(samples * self.context_length, self._shard_tokens)
        at_once: dict[int, TokenArray] = {}
        for row, shard, offset in zip(rows, shards.tolist(), offsets.tolist(), strict=True):
            tokens = at_once.get(shard)
            if tokens is None:
                tokens = at_once[shard] = self._tokens(shard)
            end = offset + length
            if end <= len(tokens):
                row[:] = tokens[offset:end]
            else:
                self._read_across(row, shard, offset)

    def document_starts(self, samples: IndexArray) -> npt.NDArray[np.bool_]:
        """Marks the tokens in each sample's context that start a new document.

        The first token is never marked: it starts a document or continues one that was cut.
        """
        marks = np.zeros((len(samples), self.context_length), dtype=np.bool_)
        firsts = (samples * self.context_length).tolist()
        for row, first in zip(marks, firsts, strict=True):
            # A document starts where the previous one ends, and that end is listed in the shard of
            # the token before it.
            last = first + self.context_length - 1
            for shard in range(first // self._shard_tokens, (last - 1) // self._shard_tokens + 1):
                shard_start = shard * self._shard_tokens
                ends = self._files.array(documents_name(self._split, shard), DOCUMENT_END_DTYPE)
                # As uint32: searching for a wider integer would convert a copy of the whole file.
                low = np.uint32(max(first - shard_start, 0))
                high = np.uint32(min(last - shard_start, self._shard_tokens))
                inside = slice(
                    np.searchsorted(ends, low, side="right"),
                    np.searchsorted(ends, high, side="right"),
                )
                row[ends[inside].astype(np.int64) + (shard_start - first)] = True
        return marks

    def files_of(self, samples: IndexArray) -> list[str]:
        """Returns the names of the token files that contain `samples`."""
        firsts = samples * self.context_length
        shards = np.concatenate([firsts, firsts + self.context_length]) // self._shard_tokens
        return [tokens_name(self._split, shard) for shard in np.unique(shards).tolist()]

    def _read_across(self, row: TokenRow, shard: int, offset: int) -> None:
        done = 0
        while done < len(row):
            part = self._tokens(shard)[offset : offset + len(row) - done]
            row[done : done + len(part)] = part
            done += len(part)
            shard, offset = shard + 1, 0

    def _tokens(self, shard: int) -> TokenArray:
        name = tokens_name(self._split, shard)
        return self._files.array(name, self._dtype, self._num_tokens_of(shard))

    def _num_tokens_of(self, shard: int) -> int:
        return min(self._shard_tokens, self.num_tokens - shard * self._shard_tokens)
