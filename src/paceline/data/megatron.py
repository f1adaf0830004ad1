r"""Megatron's indexed datasets: PREFIX.bin holds the tokens, PREFIX.idx the document index.

The index, little-endian throughout: the magic ``MMIDIDX\0\0``; uint64 version 1; uint8 code of
the token type; uint64 number of sequences; uint64 number of document bounds; int32 length of each
sequence in tokens; int64 first byte of each sequence in the .bin; int64 bounds of the documents,
as sequence numbers from 0 to the number of sequences. Readers memory-map both files.
"""

import os
import pathlib
import struct

import numpy as np
import numpy.typing as npt

from paceline.core.errors import DataError
from paceline.core.files import atomic_file
from paceline.data.manifest import (
    DOCUMENT_END_DTYPE,
    DatasetManifest,
    SplitName,
    documents_name,
    tokens_name,
)
from paceline.data.storage import Storage

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_VERSION = 1
_TYPES: dict[int, np.dtype[np.integer]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
"""Token types by code; 6 and 7 are floating point."""
_UINT16, _INT32 = 8, 4


class MegatronDataset:
    """The documents of a .bin and its .idx.

    Args:
        index: Path of the .idx.
        name: Name of the dataset in error messages.
    """

    def __init__(self, index: str | os.PathLike[str], name: str | None = None) -> None:
        path = pathlib.Path(index)
        self._name = name or str(path)
        try:
            content = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as error:  # NumPy cannot map an empty file.
            raise DataError(f"{self._name}: cannot be read: {error}") from error
        if len(content) < _HEADER.size:
            raise self._truncated()
        magic, version, code, num_sequences, num_bounds = _HEADER.unpack(
            content[: _HEADER.size].tobytes()
        )
        if magic != _MAGIC or version != _VERSION or code not in _TYPES:
            raise DataError(
                f"{self._name}: not a Megatron index (version {_VERSION}, integer tokens)"
            )
        if len(content) < _HEADER.size + 12 * num_sequences + 8 * num_bounds:
            raise self._truncated()
        self._lengths = np.frombuffer(content, "<i4", num_sequences, _HEADER.size)
        offset = _HEADER.size + 4 * num_sequences
        self._starts = np.frombuffer(content, "<i8", num_sequences, offset)
        offset += 8 * num_sequences
        self._bounds = np.frombuffer(content, "<i8", num_bounds, offset)
        self.dtype = _TYPES[code]
        self._tokens = self._map_tokens(path.with_suffix(".bin"))
        bounds = self._bounds
        if num_bounds and (
            (bounds[0], bounds[-1]) != (0, num_sequences) or (np.diff(bounds) < 0).any()
        ):
            raise DataError(f"{self._name}: its documents do not cover its sequences")

    def __len__(self) -> int:
        return max(0, len(self._bounds) - 1)

    def document(self, number: int) -> npt.NDArray[np.integer]:
        """Returns the tokens of all sequences of a document."""
        sequences = range(int(self._bounds[number]), int(self._bounds[number + 1]))
        if len(sequences) == 1:
            return self._sequence(sequences[0])
        parts = [self._sequence(each) for each in sequences]
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)

    def num_tokens(self) -> int:
        """Returns the total number of tokens."""
        return int(self._lengths.sum(dtype=np.int64))

    def _sequence(self, number: int) -> npt.NDArray[np.integer]:
        first, num_bytes = int(self._starts[number]), int(self._lengths[number])
        num_bytes *= self.dtype.itemsize
        if first < 0 or num_bytes < 0 or first + num_bytes > len(self._tokens):
            raise DataError(
                f"{self._name}: sequence {number} is at bytes {first:,} to {first + num_bytes:,} "
                f"of a .bin of {len(self._tokens):,}; it is truncated, or belongs to another .idx"
            )
        return np.frombuffer(self._tokens[first : first + num_bytes], self.dtype)

    def _map_tokens(self, path: pathlib.Path) -> npt.NDArray[np.uint8]:
        try:
            if path.stat().st_size == 0:
                return np.empty(0, np.uint8)
            return np.memmap(path, np.uint8, "r")
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; {self._name} needs it") from error

    def _truncated(self) -> DataError:
        return DataError(f"{self._name}: truncated: shorter than the counts in its header")


def write_megatron(
    storage: Storage, manifest: DatasetManifest, split: SplitName, prefix: str | os.PathLike[str]
) -> None:
    """Writes a split as PREFIX.bin and PREFIX.idx, the index last.

    Every document is one sequence that ends with the end-of-document token, as in the output of
    Megatron's own preparation with --append-eod.
    """
    code = _UINT16 if manifest.dtype == "uint16" else _INT32
    num_before = 0
    ends = []
    with atomic_file(pathlib.Path(f"{os.fspath(prefix)}.bin")) as file:
        for shard in range(manifest.num_shards(split)):
            content = storage.read(tokens_name(split, shard))
            shard_ends = np.frombuffer(
                storage.read(documents_name(split, shard)), DOCUMENT_END_DTYPE
            )
            ends.append(shard_ends.astype(np.int64) + num_before)
            num_before += len(content) // manifest.token_bytes
            file.write(content)  # A uint32 below 2^31 is an int32.
    document_ends = np.concatenate([np.zeros(1, np.int64), *ends])
    lengths = np.diff(document_ends)
    num_documents = len(lengths)
    with atomic_file(pathlib.Path(f"{os.fspath(prefix)}.idx")) as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, code, num_documents, num_documents + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write((document_ends[:-1] * manifest.token_bytes).astype("<i8").tobytes())
        file.write(np.arange(num_documents + 1, dtype="<i8").tobytes())
