"""Datasets for measurements, which only have a manifest and the tokens of their shards."""

import pathlib
from collections.abc import Sequence

import msgspec

from paceline.data.manifest import MANIFEST, SCHEMA, DatasetManifest, Split, encode_manifest
from paceline.data.storage import open_storage


def write_manifest(
    place: pathlib.Path,
    num_shards: int,
    shard_tokens: int,
    *,
    shards: Sequence[object] = (),
    tokenizer_blake3: str = "",
) -> None:
    """Writes the manifest of a dataset of full shards.

    Args:
        place: The dataset's directory.
        num_shards: Number of shards.
        shard_tokens: Tokens per shard.
        shards: Their entries in the manifest, if it is to have any.
        tokenizer_blake3: Digest of the tokenizer, if there is to be one.
    """
    split = Split(
        num_tokens=num_shards * shard_tokens,
        num_documents=0,
        shards=msgspec.Raw(msgspec.json.encode(shards)),
    )
    manifest = DatasetManifest(
        schema=SCHEMA,
        dtype="uint16",
        shard_tokens=shard_tokens,
        vocab_size=50_000,
        end_of_document=0,
        tokenizer_blake3=tokenizer_blake3,
        options={},
        sources=[],
        num_source_bytes=0,
        dropped={},
        splits={"train": split},
    )
    open_storage(place).write(MANIFEST, encode_manifest(manifest))
