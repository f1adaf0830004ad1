"""Inspects a prepared dataset in parts of bounded size: defects, document lengths, beginnings."""

import dataclasses
from collections.abc import Iterator

import blake3
import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.core.finding import Finding
from paceline.core.units import Progress
from paceline.data.manifest import (
    DOCUMENT_END_DTYPE,
    MANIFEST,
    TOKENIZER,
    DatasetManifest,
    ShardEntry,
    Split,
    SplitName,
    documents_name,
    tokens_name,
)
from paceline.data.storage import Storage

_PART_BYTES = 2**24
_UNORDERED = "has documents that end before they begin"
_REMEDY = "prepare the dataset again, or restore the file from a backup"


def verify(
    storage: Storage, manifest: DatasetManifest, progress: Progress = lambda done, total: None
) -> Iterator[Finding]:
    """Yields the defects of a dataset; nothing if it matches its manifest."""
    sizes = storage.sizes()
    expected = {
        name: size for split in manifest.splits for name, size in _expected_sizes(manifest, split)
    }
    total, done = sum(expected.values()), 0
    if sizes.get(TOKENIZER) is None:
        yield _finding("missing", storage, TOKENIZER, "is missing")
    elif blake3.blake3(storage.read(TOKENIZER)).hexdigest() != manifest.tokenizer_blake3:
        yield _finding("digest", storage, TOKENIZER, "is not the tokenizer of this dataset")
    for split, contents in manifest.splits.items():
        if not _adds_up(contents):
            what = f"has other numbers for the split {split} than for its shards together"
            yield _finding("counts", storage, MANIFEST, what)
        for shard, entry in enumerate(contents.shard_entries()):
            names = documents_name(split, shard), tokens_name(split, shard)
            wrong = list(_wrong_sizes(storage, names, sizes, expected))
            yield from wrong or _verify_shard(storage, manifest, names, entry)
            done += sum(expected[name] for name in names)
            progress(done, total)
    for name in sorted(sizes.keys() - expected.keys()):
        if name.partition("/")[0] in manifest.splits:
            yield _finding("unexpected", storage, name, "is not in the manifest", "remove it")


def _adds_up(split: Split) -> bool:
    entries = split.shard_entries()
    num_tokens = sum(entry.num_tokens for entry in entries)
    num_documents = sum(entry.num_documents for entry in entries)
    return (num_tokens, num_documents) == (split.num_tokens, split.num_documents)


def _expected_sizes(manifest: DatasetManifest, split: SplitName) -> Iterator[tuple[str, int]]:
    for shard, entry in enumerate(manifest.splits[split].shard_entries()):
        sizes = manifest.shard_sizes(entry)
        yield tokens_name(split, shard), sizes.tokens
        yield documents_name(split, shard), sizes.documents


def _wrong_sizes(
    storage: Storage, names: tuple[str, ...], sizes: dict[str, int], expected: dict[str, int]
) -> Iterator[Finding]:
    for name in names:
        if name not in sizes:
            yield _finding("missing", storage, name, "is missing")
        elif sizes[name] != expected[name]:
            what = f"has {sizes[name]:,} bytes instead of {expected[name]:,}"
            yield _finding("size", storage, name, what)


def _verify_shard(
    storage: Storage, manifest: DatasetManifest, names: tuple[str, str], entry: ShardEntry
) -> Iterator[Finding]:
    """Yields the defects in the contents of a shard whose files have the right sizes."""
    documents, tokens = names
    content = storage.read(documents)
    if blake3.blake3(content).hexdigest() != entry.documents_blake3:
        yield _finding("digest", storage, documents, "does not match its digest in the manifest")
        return
    ends = np.frombuffer(content, DOCUMENT_END_DTYPE).astype(np.int64)
    if np.any(np.diff(ends, prepend=0) < 1) or np.any(ends > entry.num_tokens):
        yield _finding("documents", storage, documents, _UNORDERED)
        return
    digest = blake3.blake3()
    largest, num_open = -1, 0
    dtype = np.dtype(manifest.stored_dtype)
    for start, content in _parts(storage, tokens, entry.num_tokens, dtype.itemsize):
        digest.update(content)
        part = np.frombuffer(content, dtype)
        largest = max(largest, int(part.max()))
        inside = ends[(ends > start) & (ends <= start + len(part))] - start
        num_open += int(np.count_nonzero(part[inside - 1] != manifest.end_of_document))
    if digest.hexdigest() != entry.tokens_blake3:
        yield _finding("digest", storage, tokens, "does not match its digest in the manifest")
    elif largest >= manifest.vocab_size:
        what = f"has the token {largest}, beyond the vocabulary of {manifest.vocab_size:,}"
        yield _finding("vocabulary", storage, tokens, what)
    elif num_open:
        what = f"has {num_open:,} documents without the token that ends them"
        yield _finding("documents", storage, tokens, what)


def _parts(storage: Storage, name: str, num_tokens: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Yields a shard's tokens, of `size` bytes each, in parts with their first index."""
    step = _PART_BYTES // size
    for start in range(0, num_tokens, step):
        end = min(start + step, num_tokens)
        yield start, storage.read_range(name, start * size, end * size)


def _finding(kind: str, storage: Storage, name: str, what: str, remedy: str = _REMEDY) -> Finding:
    return Finding(name=kind, message=f"{storage.url}/{name} {what}", remedy=remedy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentLengths:
    """A histogram of document lengths in tokens, including the end-of-document token."""

    counts: tuple[int, ...]
    """Documents of 1, 2 to 3, 4 to 7, ... tokens."""
    num_documents: int
    num_tokens: int
    longest: int


def document_lengths(
    storage: Storage, manifest: DatasetManifest, split: SplitName, max_shards: int | None = None
) -> DocumentLengths:
    """Counts the documents of a split's first `max_shards` shards, by default of all shards."""
    counts = np.zeros(64, np.int64)
    begun = num_tokens = longest = 0
    num_shards = manifest.num_shards(split)
    for shard in range(num_shards if max_shards is None else min(max_shards, num_shards)):
        ends = _document_ends(storage, split, shard)
        # The first document of a shard may have started in an earlier shard.
        lengths = np.diff(ends, prepend=-begun)
        if np.any(lengths < 1):
            name = documents_name(split, shard)
            raise DataError(f"{storage.url}/{name} {_UNORDERED}; {_REMEDY}")
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


def document_beginnings(
    storage: Storage,
    manifest: DatasetManifest,
    split: SplitName,
    num_documents: int,
    num_tokens: int,
) -> Iterator[NDArray[np.unsignedinteger]]:
    """Yields the first tokens of documents spread evenly over a split's first shard."""
    if not manifest.num_shards(split):
        return
    ends = _document_ends(storage, split, 0)
    starts = np.concatenate([[0], ends[:-1]]) if ends.size else np.zeros(0, np.int64)
    chosen = np.unique(np.linspace(0, len(starts) - 1, num_documents).astype(np.int64))
    size = manifest.token_bytes
    for index in chosen[: len(starts)]:
        start = int(starts[index])
        end = min(start + num_tokens, int(ends[index]) - 1)  # Without the end-of-document token.
        content = storage.read_range(tokens_name(split, 0), start * size, end * size)
        yield np.frombuffer(content, manifest.stored_dtype)


def _document_ends(storage: Storage, split: SplitName, shard: int) -> NDArray[np.int64]:
    name = documents_name(split, shard)
    try:
        content = storage.read(name)
    except FileNotFoundError:
        raise DataError(f"{storage.url}/{name} is missing; {_REMEDY}") from None
    return np.frombuffer(content, DOCUMENT_END_DTYPE).astype(np.int64)
