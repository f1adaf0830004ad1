"""What a run reads, in which order. Torch-free, because the command line parses with it."""

import dataclasses

from paceline.core.errors import UsageError
from paceline.core.units import GB
from paceline.data.format.manifest import SplitName


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One prepared dataset of a mixture."""

    place: str
    """Its directory, or ``s3://bucket/prefix``."""
    weight: float = 1.0
    """Its share of the samples, relative to the other sources' weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """The batches of a run."""

    sources: tuple[SourceConfig, ...]
    """The datasets to read from."""
    split: SplitName = "train"
    """The split of each dataset."""
    context_length: int
    """Tokens that a sequence feeds to the model; a sample has one more, the last target."""
    batch_size: int
    """Sequences per step, over all ranks."""
    seed: int = 0
    """Decides the order of the samples."""
    window: int | None = None
    """Samples in a block that is read before another one is; None shuffles whole epochs. Streaming
    needs one whose shards fit into the cache."""
    document_boundaries: bool = False
    """Also give each token's position in its document and the number of that document."""
    digests: bool = True
    """Also give a digest of each batch, for the audit trail."""
    prefetch: int = 2
    """Batches that a thread reads ahead; 0 reads each when it is asked for."""
    cache_directory: str | None = None
    """Where shards from S3 are kept; several processes of a machine may share it."""
    cache_bytes: int = 100 * GB
    """Bytes that the cached shards may take."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise UsageError("no source to read from; name a prepared dataset")
        for name in ("context_length", "batch_size", "cache_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)}: give 1 or more")
        if self.prefetch < 0:
            raise UsageError(f"prefetch {self.prefetch}: give 0 or more")
