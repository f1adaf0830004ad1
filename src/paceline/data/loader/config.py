"""Configuration of the data loader. Free of torch, because the command line imports it."""

import dataclasses

from paceline.core.errors import UsageError
from paceline.core.units import GB
from paceline.data.manifest import SplitName


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One prepared dataset of a mixture."""

    place: str
    """Directory of the dataset, or ``s3://bucket/prefix``."""
    weight: float = 1.0
    """Weight of the dataset in the mixture, relative to the weights of the other sources."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """The configuration of a run's batches."""

    sources: tuple[SourceConfig, ...]
    """Prepared datasets to read."""
    split: SplitName = "train"
    """Split of each dataset to read."""
    context_length: int
    """Context length in tokens; a sample has one token more, the last target."""
    batch_size: int
    """Global batch size: sequences per step, over all ranks."""
    seed: int = 0
    """Random seed of the order of the samples."""
    window: int | None = None
    """Samples per shuffle window; None shuffles whole epochs. Streaming from S3 needs a window
    whose shards fit into the cache."""
    document_boundaries: bool = False
    """Whether batches also have each token's position in its document and the document's number."""
    digests: bool = True
    """Whether batches also have a digest, for the audit trail."""
    prefetch: int = 2
    """Batches that a thread prefetches; 0 reads each batch on demand."""
    cache_directory: str | None = None
    """Directory that caches shards from S3; several processes on a machine may share it."""
    cache_bytes: int = 100 * GB
    """Maximum size of the cache in bytes."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise UsageError("sources is empty; name a prepared dataset")
        for name in ("context_length", "batch_size", "cache_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)}: give 1 or more")
        if self.prefetch < 0:
            raise UsageError(f"prefetch {self.prefetch}: give 0 or more")
