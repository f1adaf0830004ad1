"""The first tokens of some documents of a split."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from paceline.data.format.manifest import (
    DOCUMENT_END_DTYPE,
    Manifest,
    SplitName,
    documents_name,
    tokens_name,
)
from paceline.data.storage import Storage


def document_beginnings(
    storage: Storage, manifest: Manifest, split: SplitName, num_documents: int, num_tokens: int
) -> Iterator[NDArray[np.unsignedinteger]]:
    """Yields the first tokens of documents spread evenly over a split's first shard."""
    if not manifest.num_shards(split):
        return
    ends = np.frombuffer(storage.read(documents_name(split, 0)), DOCUMENT_END_DTYPE)
    starts = np.concatenate([[0], ends[:-1]]) if ends.size else np.zeros(0, np.int64)
    chosen = np.unique(np.linspace(0, len(starts) - 1, num_documents).astype(np.int64))
    size = manifest.token_bytes
    for index in chosen[: len(starts)]:
        start = int(starts[index])
        end = min(start + num_tokens, int(ends[index]) - 1)  # Without the end-of-document token.
        content = storage.read_range(tokens_name(split, 0), start * size, end * size)
        yield np.frombuffer(content, manifest.stored_dtype)
