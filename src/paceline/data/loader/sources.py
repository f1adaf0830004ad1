"""The open sources of a run: samples from a directory or through a cache."""

import dataclasses
import functools
from typing import BinaryIO

import blake3
import msgspec

from paceline.core.errors import DataError, UsageError
from paceline.core.units import format_binary_bytes
from paceline.data.format.manifest import Manifest, read_manifest
from paceline.data.loader.cache import ShardCache
from paceline.data.loader.config import LoaderConfig
from paceline.data.loader.samples import SplitSamples
from paceline.data.loader.shard_files import MOST_OPEN, ShardFiles
from paceline.data.sampling.permutation import IndexArray
from paceline.data.storage import Storage, open_storage
from paceline.data.storage.local import LocalStorage


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenSource:
    """One open dataset."""

    place: str
    """Its directory or URL."""
    manifest: Manifest
    """Its manifest."""
    samples: SplitSamples
    """Its samples."""
    files: ShardFiles
    """Its files."""
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


def _open_source(storage: Storage, manifest: Manifest, config: LoaderConfig) -> OpenSource:
    if isinstance(storage, LocalStorage):
        cache = None
        files = ShardFiles(functools.partial(_open_local, storage))
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
    samples = SplitSamples(manifest, config.split, files, config.context_length, place=storage.url)
    return OpenSource(
        place=storage.url, manifest=manifest, samples=samples, files=files, cache=cache
    )


def _open_local(storage: LocalStorage, name: str) -> BinaryIO:
    return storage.path(name).open("rb")


def _shards_in_use(storage: Storage, manifest: Manifest, config: LoaderConfig) -> int:
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
