"""Writes small prepared datasets directly, without running the preparation."""

import os
from collections.abc import Sequence
from typing import Any

import blake3
import msgspec
import numpy as np
import numpy.typing as npt

from paceline.data.manifest import (
    MANIFEST,
    SCHEMA,
    TOKENIZER,
    DatasetManifest,
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
    """Returns documents of random tokens, `num_tokens` in total including their end tokens."""
    generator = np.random.default_rng(seed)
    documents: list[list[int]] = []
    while num_tokens:
        length = int(min(generator.integers(1, longest + 1), num_tokens))
        documents.append(generator.integers(0, END_OF_DOCUMENT, length - 1).tolist())
        num_tokens -= length
    return documents


def write_dataset(
    place: str | os.PathLike[str],
    documents: Sequence[Sequence[int] | npt.NDArray[Any]],
    *,
    shard_tokens: int = 64,
    dtype: TokenType = "uint16",
    split: SplitName = "train",
    tokenizer: bytes = b"{}",
) -> npt.NDArray[np.int64]:
    """Writes a dataset of `documents`, each followed by its end token; returns all tokens."""
    storage = open_storage(place)
    ended = [np.append(np.asarray(each, dtype=np.int64), END_OF_DOCUMENT) for each in documents]
    tokens = np.concatenate(ended)
    ends = np.cumsum([len(document) for document in ended])
    entries = []
    for shard, start in enumerate(range(0, len(tokens), shard_tokens)):
        own = tokens[start : start + shard_tokens].astype(np.dtype(dtype).newbyteorder("<"))
        own_ends = ends[(ends > start) & (ends <= start + shard_tokens)] - start
        entries.append(_write_shard(storage, split, shard, own, own_ends))
    manifest = DatasetManifest(
        schema=SCHEMA,
        dtype=dtype,
        shard_tokens=shard_tokens,
        vocab_size=256,
        end_of_document=END_OF_DOCUMENT,
        tokenizer_blake3=blake3.blake3(tokenizer).hexdigest(),
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
    storage.write(TOKENIZER, tokenizer)
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
