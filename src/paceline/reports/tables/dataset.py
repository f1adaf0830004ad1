"""Tables of a prepared dataset."""

from paceline.core.units import format_binary_bytes, format_count
from paceline.data.manifest import DatasetManifest
from paceline.reports.tables.table import Table


def splits_table(manifest: DatasetManifest, place: str) -> Table:
    """Returns a row per split: shards, documents, tokens, size."""
    vocabulary = f"vocabulary of {manifest.vocab_size:,} as {manifest.dtype}"
    return Table(
        headers=("split", "shards", "documents", "tokens", "size"),
        rows=tuple(
            (
                name,
                f"{manifest.num_shards(name):,}",
                f"{split.num_documents:,}",
                f"{split.num_tokens:,}",
                format_binary_bytes(split.num_tokens * manifest.token_bytes),
            )
            for name, split in manifest.splits.items()
        ),
        caption=(
            f"{place}: {len(manifest.sources):,} files, {vocabulary}, "
            f"{manifest.source_bytes_per_token:.2f} bytes per token, "
            f"{format_count(manifest.shard_tokens)} tokens per shard"
        ),
    )


def dropped_table(manifest: DatasetManifest) -> Table:
    """Returns a row per reason for dropping documents."""
    return Table(
        headers=("left out", "documents", "size", "for example"),
        rows=tuple(
            (
                reason,
                f"{dropped.num_documents:,}",
                format_binary_bytes(dropped.num_bytes),
                dropped.examples[0] if dropped.examples else "",
            )
            for reason, dropped in manifest.dropped.items()
        ),
        caption="Documents that were left out",
    )
