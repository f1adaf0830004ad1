"""Tests that a manifest survives a round trip, and that its defects are named."""

import pathlib

import msgspec
import pytest

from paceline.core.errors import DataError
from paceline.data.manifest import (
    MANIFEST,
    DatasetManifest,
    ShardEntry,
    Split,
    encode_manifest,
    read_manifest,
)
from paceline.data.storage import open_storage

_ENTRY = ShardEntry(num_tokens=7, num_documents=2, tokens_blake3="aa", documents_blake3="bb")
_MANIFEST = DatasetManifest(
    schema=1,
    dtype="uint16",
    shard_tokens=8,
    vocab_size=256,
    end_of_document=255,
    tokenizer_blake3="cc",
    options={"heldout_fraction": 0.01},
    sources=[],
    num_source_bytes=13,
    dropped={},
    splits={
        "train": Split(
            num_tokens=15,
            num_documents=4,
            shards=msgspec.Raw(msgspec.json.encode([_ENTRY, _ENTRY])),
        )
    },
)


def test_it_comes_back_as_it_was_written(tmp_path: pathlib.Path) -> None:
    storage = open_storage(tmp_path)
    storage.write(MANIFEST, encode_manifest(_MANIFEST))
    manifest = read_manifest(storage)
    assert manifest.num_shards("train") == 2
    assert manifest.token_bytes == 2
    assert manifest.splits["train"].shard_entries() == [_ENTRY, _ENTRY]
    assert manifest.fingerprint == _MANIFEST.fingerprint
    assert encode_manifest(manifest) == encode_manifest(_MANIFEST)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "an unfinished one; run `paceline data prepare`"),
        (b"{", "manifest.json: not a manifest"),
        (b"\xff", "manifest.json: not a manifest"),
        (encode_manifest(_MANIFEST).replace(b'"uint16"', b'"int8"'), r"`\$\.dtype`"),
        (encode_manifest(_MANIFEST).replace(b'"schema":1', b'"schema":2'), "schema 2"),
        (encode_manifest(_MANIFEST).replace(b'"schema"', b'"unknown":0,"schema"'), "unknown"),
    ],
)
def test_a_defect_is_named(tmp_path: pathlib.Path, content: bytes | None, message: str) -> None:
    storage = open_storage(tmp_path)
    if content is not None:
        storage.write(MANIFEST, content)
    with pytest.raises(DataError, match=message):
        read_manifest(storage)
