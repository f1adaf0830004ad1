"""Memory-mapped shards, a bounded number at a time.

A shard's file is opened on first access, and the least recently used file is unmapped: a run over
10^5 shards opens only the shards that it reads, and never all at once. A file whose size differs
from the manifest is an error, because reading past the end of a mapped file would kill the process.
"""

import collections
import mmap
import os
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from paceline.core.errors import DataError

MOST_OPEN = 256

OpenFile = Callable[[str], BinaryIO]
"""Maps the name of a shard's file to the open local file."""
TokenArray = npt.NDArray[np.unsignedinteger[Any]]


class ShardFiles:
    """The files of one dataset as arrays.

    Args:
        open_file: Opens a file; may fetch it first.
        most_open: Maximum number of mapped files.
    """

    def __init__(self, open_file: OpenFile, *, most_open: int = MOST_OPEN) -> None:
        self._open_file = open_file
        self._most_open = most_open
        self._mapped: collections.OrderedDict[str, TokenArray] = collections.OrderedDict()

    def array(self, name: str, dtype: str, num_items: int | None = None) -> TokenArray:
        """Returns a file's content, memory-mapped; raises unless it has `num_items` items."""
        mapped = self._mapped.get(name)
        if mapped is not None:
            self._mapped.move_to_end(name)
            return mapped
        while len(self._mapped) >= self._most_open:
            self._mapped.popitem(last=False)  # Unmapped when no array refers to it any more.
        try:
            with self._open_file(name) as file:
                mapped = _map(file, np.dtype(dtype), num_items)
        except OSError as error:
            raise DataError(
                f"{error.filename or name}: {error.strerror}; the dataset is incomplete: "
                "run `paceline data verify`"
            ) from error
        self._mapped[name] = mapped
        return mapped

    def close(self) -> None:
        """Releases all files."""
        self._mapped.clear()


def _map(file: BinaryIO, dtype: np.dtype[Any], num_items: int | None) -> TokenArray:
    num_bytes = os.fstat(file.fileno()).st_size
    expected = num_bytes // dtype.itemsize if num_items is None else num_items
    if num_bytes != expected * dtype.itemsize:
        raise DataError(
            f"{file.name}: {num_bytes:,} bytes, but {expected * dtype.itemsize:,} in the "
            "manifest; it is truncated or belongs to another dataset: run `paceline data verify`"
        )
    if not num_bytes:
        return np.empty(0, dtype=dtype)
    # A plain array over the mapping, because slicing np.memmap takes several times as long.
    return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=dtype)
