"""Small prepared datasets, written directly."""

import os
from collections.abc import Sequence

import blake3
import msgspec
import numpy as np
import numpy.typing as npt

from paceline.data.format.manifest import (
    MANIFEST,
    SCHEMA,
    Manifest,
    ShardEntry,
    Split,
    SplitName,
    TokenType,
    documents_name,
    encode_manifest,
    tokens_name,
)
from paceline.data.storage import Storage, open_storage

END_OF_DOCUMENT = 255


def random_documents(num_tokens: int, *, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Returns documents of random tokens, with their ends, of `num_tokens` in all."""
    generator = np.random.default_rng(seed)
    documents: list[list[int]] = []
    while num_tokens:
        length = int(min(generator.integers(1, longest + 1), num_tokens))
        documents.append(
            [*generator.integers(0, END_OF_DOCUMENT, length - 1).tolist(), END_OF_DOCUMENT]
        )
        num_tokens -= length
    return documents


def write_dataset(
    place: str | os.PathLike[str],
    documents: Sequence[Sequence[int]],
    *,
    shard_tokens: int = 64,
    dtype: TokenType = "uint16",
    split: SplitName = "train",
    tokenizer_blake3: str = "00",
) -> npt.NDArray[np.int64]:
    """Writes the shards and the manifest of `documents`; returns their tokens."""
    storage = open_storage(place)
    tokens = np.concatenate([np.asarray(document, dtype=np.int64) for document in documents])
    ends = np.cumsum([len(document) for document in documents])
    entries = []
    for shard, start in enumerate(range(0, len(tokens), shard_tokens)):
        own = tokens[start : start + shard_tokens].astype(np.dtype(dtype).newbyteorder("<"))
        own_ends = ends[(ends > start) & (ends <= start + shard_tokens)] - start
        entries.append(_write_shard(storage, split, shard, own, own_ends))
    manifest = Manifest(
        schema=SCHEMA,
        dtype=dtype,
        shard_tokens=shard_tokens,
        vocab_size=256,
        end_of_document=END_OF_DOCUMENT,
        tokenizer_blake3=tokenizer_blake3,
        options={},
        sources=[],
        num_source_bytes=len(tokens),
        dropped={},
        splits={
            split: Split(
                num_tokens=len(tokens),
                num_documents=len(documents),
                shards=msgspec.Raw(msgspec.json.encode(entries)),
            )
        },
    )
    storage.write(MANIFEST, encode_manifest(manifest))
    return tokens


def _write_shard(
    storage: Storage,
    split: SplitName,
    shard: int,
    own: npt.NDArray[np.unsignedinteger],
    ends: npt.NDArray[np.int64],
) -> ShardEntry:
    tokens, documents = own.tobytes(), ends.astype("<u4").tobytes()
    storage.write(tokens_name(split, shard), tokens)
    storage.write(documents_name(split, shard), documents)
    return ShardEntry(
        num_tokens=len(own),
        num_documents=len(ends),
        tokens_blake3=blake3.blake3(tokens).hexdigest(),
        documents_blake3=blake3.blake3(documents).hexdigest(),
    )
