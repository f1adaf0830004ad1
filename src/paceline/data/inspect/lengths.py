"""A histogram of document lengths of a split in powers of two, computed shard by shard."""

import dataclasses

import numpy as np

from paceline.data.format.manifest import DOCUMENT_END_DTYPE, Manifest, SplitName, documents_name
from paceline.data.storage import Storage


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentLengths:
    """A histogram of document lengths in tokens, including the end-of-document token."""

    counts: tuple[int, ...]
    """Documents of 1, 2 to 3, 4 to 7, ... tokens."""
    num_documents: int
    num_tokens: int
    longest: int

    @property
    def median_bin(self) -> int:
        """Index in `counts` of the bin with the median document."""
        below = np.cumsum(self.counts)
        return int(np.searchsorted(below, (self.num_documents + 1) // 2))


def document_lengths(
    storage: Storage, manifest: Manifest, split: SplitName, max_shards: int | None = None
) -> DocumentLengths:
    """Counts the documents of a split's first `max_shards` shards, by default of all shards."""
    counts = np.zeros(64, np.int64)
    begun = num_tokens = longest = 0
    num_shards = manifest.num_shards(split)
    for shard in range(num_shards if max_shards is None else min(max_shards, num_shards)):
        content = storage.read(documents_name(split, shard))
        ends = np.frombuffer(content, DOCUMENT_END_DTYPE).astype(np.int64)
        # The first document of a shard may have started in an earlier shard.
        lengths = np.diff(ends, prepend=-begun)
        begun = (begun if not ends.size else -int(ends[-1])) + manifest.shard_tokens
        if lengths.size:
            np.add.at(counts, np.log2(lengths).astype(np.int64), 1)
            num_tokens += int(lengths.sum())
            longest = max(longest, int(lengths.max()))
    used = np.trim_zeros(counts, "b")
    return DocumentLengths(
        counts=tuple(used.tolist()),
        num_documents=int(counts.sum()),
        num_tokens=num_tokens,
        longest=longest,
    )
