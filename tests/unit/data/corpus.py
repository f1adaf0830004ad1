"""Writes small corpora, and reads the datasets prepared from them."""

import dataclasses
import json
import pathlib
import random
from typing import Any

import numpy as np

from paceline.core.lock import LOCK
from paceline.data.manifest import DatasetManifest, SplitName, documents_name, tokens_name
from paceline.data.prepare.config import PrepareConfig
from paceline.data.storage import open_storage

WORDS = ["the", "shard", "of", "a", "stream", "is", "cut,", "naïve", "or", "not:", "∑", "🌊", "\n"]


def make_documents(number: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    return [
        f"{seed}.{each}: " + " ".join(chance.choices(WORDS, k=chance.randrange(3, 60)))
        for each in range(number)
    ]


def write_jsonl(path: pathlib.Path, documents: list[str]) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"id": 1, "text": text}, ensure_ascii=False) + "\n" for text in documents)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def write_corpus(directory: pathlib.Path, seed: int = 0, per_file: int = 120) -> list[str]:
    """Writes files of several kinds with some duplicates; returns distinct documents in order."""
    first, second = make_documents(per_file, seed), make_documents(per_file, seed + 1)
    second[3] = first[5]
    third = [*make_documents(per_file // 2, seed + 2), first[0], second[7], first[5]]
    write_jsonl(directory / "a.jsonl", first)
    (directory / "b.txt").write_text("<|endoftext|>".join(second), encoding="utf-8")
    write_jsonl(directory / "deeper" / "c.ndjson", third)
    return list(dict.fromkeys([*first, *second, *third]))


def config_of(source: pathlib.Path, out: pathlib.Path | str, **changes: Any) -> PrepareConfig:
    config = PrepareConfig(
        sources=(str(source),),
        tokenizer="bytes",
        out=str(out),
        heldout=0.1,
        shard_tokens=5000,
        workers=1,
    )
    return dataclasses.replace(config, **changes)


def dataset_bytes(out: pathlib.Path) -> dict[str, bytes]:
    """Returns the content of every file of a dataset, including hidden ones but for the lock."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and path.name != LOCK
    }


def stored_documents(
    out: pathlib.Path | str, manifest: DatasetManifest, split: SplitName
) -> list[np.ndarray]:
    """Returns the tokens of each document of a split, including its end token, from all shards."""
    storage = open_storage(out)
    streams, ends = [], []
    for shard, entry in enumerate(manifest.splits[split].shard_entries()):
        tokens = np.frombuffer(storage.read(tokens_name(split, shard)), manifest.dtype)
        here = np.frombuffer(storage.read(documents_name(split, shard)), "<u4")
        assert len(tokens) == entry.num_tokens
        assert len(here) == entry.num_documents
        is_last = shard == manifest.num_shards(split) - 1
        assert is_last or len(tokens) == manifest.shard_tokens
        streams.append(tokens)
        ends.append(here.astype(np.int64) + shard * manifest.shard_tokens)
    if not streams:
        return []
    stream, bounds = np.concatenate(streams), np.concatenate(ends)
    assert bounds[-1] == len(stream) == manifest.splits[split].num_tokens
    assert len(bounds) == manifest.splits[split].num_documents
    return np.split(stream, bounds[:-1])


def stored_texts(out: pathlib.Path | str, manifest: DatasetManifest, split: SplitName) -> list[str]:
    """Returns the texts of a dataset in the byte vocabulary."""
    texts = []
    for document in stored_documents(out, manifest, split):
        assert document[-1] == 255
        texts.append(document[:-1].astype(np.uint8).tobytes().decode())
    return texts
