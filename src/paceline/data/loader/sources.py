"""The open sources of a run: samples of prepared datasets, in a directory or through a cache.

With a context of T tokens, sample n is the tokens [n*T, n*T + T + 1) of the split's stream: inputs
and targets, shifted by one token. A sample may cross shard boundaries. Its location is computed; no
index is read.

Shards are memory-mapped on first access, and the least recently used one is unmapped: a run over
10^5 shards opens only those that it reads, and never all at once. A file whose size differs from
the manifest is an error, because reading past the end of a mapped file would kill the process.
"""

import collections
import dataclasses
import mmap
import os
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

import blake3
import msgspec
import numpy as np
import numpy.typing as npt

from paceline.core.errors import DataError, UsageError
from paceline.core.units import format_binary_bytes
from paceline.data.loader.cache import ShardCache
from paceline.data.loader.config import LoaderConfig
from paceline.data.manifest import (
    DOCUMENT_END_DTYPE,
    DatasetManifest,
    SplitName,
    documents_name,
    read_manifest,
    tokens_name,
)
from paceline.data.sampling import IndexArray
from paceline.data.storage import LocalStorage, Storage, open_storage

MOST_OPEN = 256

OpenFile = Callable[[str], BinaryIO]
"""Maps the name of a shard's file to the open local file."""
TokenArray = npt.NDArray[np.unsignedinteger[Any]]


class ShardFiles:
    """The files of one dataset as arrays."""

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


TokenRow = npt.NDArray[np.int64]


class SplitSamples:
    """The samples of a split."""

    def __init__(
        self,
        manifest: DatasetManifest,
        split: SplitName,
        files: ShardFiles,
        context_length: int,
        *,
        url: str,
    ) -> None:
        if split not in manifest.splits:
            known = ", ".join(manifest.splits)
            raise DataError(f"{url}: no split {split!r}; it has {known}")
        self.num_tokens = manifest.splits[split].num_tokens
        self.num_samples = max(0, self.num_tokens - 1) // context_length
        if not self.num_samples:
            raise DataError(
                f"{url}: split {split!r} has {self.num_tokens:,} tokens, less than one sample "
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenSource:
    """One open dataset."""

    manifest: DatasetManifest
    samples: SplitSamples
    files: ShardFiles
    cache: ShardCache | None
    """The cache of its files; None if they are local."""

    def fetch_ahead(self, samples: IndexArray) -> None:
        """Starts to fetch the files that `samples` need."""
        if self.cache is not None:
            self.cache.fetch_ahead(self.samples.files_of(samples))

    def close(self) -> None:
        """Releases all files."""
        self.files.close()
        if self.cache is not None:
            self.cache.close()


def open_sources(config: LoaderConfig) -> list[OpenSource]:
    """Opens the sources of a run, which must share one vocabulary."""
    storages = [open_storage(source.place) for source in config.sources]
    manifests = [read_manifest(storage) for storage in storages]
    for storage, manifest in zip(storages, manifests, strict=True):
        if manifest.tokenizer_blake3 != manifests[0].tokenizer_blake3:
            raise DataError(
                f"{storage.url} was prepared with another tokenizer than {storages[0].url}; all "
                "sources of a mixture need the same one: prepare one of them again"
            )
    return [
        _open_source(storage, manifest, config)
        for storage, manifest in zip(storages, manifests, strict=True)
    ]


def sources_digest(sources: list[OpenSource]) -> str:
    """Returns a digest that identifies the datasets, independent of their location."""
    fingerprints = [source.manifest.fingerprint for source in sources]
    return blake3.blake3(msgspec.json.encode(fingerprints)).hexdigest(16)


def _open_source(storage: Storage, manifest: DatasetManifest, config: LoaderConfig) -> OpenSource:
    if isinstance(storage, LocalStorage):
        cache = None
        files = ShardFiles(lambda name: storage.path(name).open("rb"))
    else:
        if config.cache_directory is None:
            raise UsageError(f"{storage.url}: streaming from S3 needs a cache; set cache_directory")
        most_open = _shards_in_use(storage, manifest, config)
        cache = ShardCache(
            storage,
            manifest,
            config.split,
            directory=config.cache_directory,
            most_bytes=config.cache_bytes,
        )
        files = ShardFiles(cache.open, most_open=most_open)
    samples = SplitSamples(manifest, config.split, files, config.context_length, url=storage.url)
    return OpenSource(manifest=manifest, samples=samples, files=files, cache=cache)


def _shards_in_use(storage: Storage, manifest: DatasetManifest, config: LoaderConfig) -> int:
    """Returns how many files a process may keep open; raises if the cache is too small.

    Without a window, consecutive samples are in different shards: a cache that does not hold the
    whole split would fetch a shard for almost every sample.
    """
    room = config.cache_bytes // len(config.sources)
    shard_bytes = manifest.shard_tokens * manifest.token_bytes
    split_bytes = manifest.splits[config.split].num_tokens * manifest.token_bytes
    if split_bytes <= room:
        return MOST_OPEN
    if config.window is None:
        raise UsageError(
            f"{storage.url} has {format_binary_bytes(split_bytes)}, but the cache only has space "
            f"for {format_binary_bytes(room)}; set a window, or raise cache_bytes"
        )
    # A window may start and end inside a shard, and the next window is fetched during this one.
    in_window = config.window * config.context_length // manifest.shard_tokens + 2
    if 2 * in_window * shard_bytes > room:
        raise UsageError(
            f"{storage.url}: a window of {config.window:,} samples and the next one span "
            f"{2 * in_window} shards of {format_binary_bytes(shard_bytes)}, but the cache only "
            f"has space for {format_binary_bytes(room)}; use a smaller window or raise cache_bytes"
        )
    return in_window * (2 if config.document_boundaries else 1)
