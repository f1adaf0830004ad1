"""Tests that samples have the right tokens across shards, and that damage is named."""

import os
import pathlib
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import DataError, UsageError
from paceline.data.loader.batches import BatchReader
from paceline.data.loader.config import LoaderConfig, SourceConfig
from paceline.data.loader.sources import (
    MOST_OPEN,
    OpenSource,
    ShardFiles,
    SplitSamples,
    _shards_in_use,
    sources_digest,
)
from tests.unit.data.dataset_factory import random_documents, write_dataset


def make_reader(place: pathlib.Path, context_length: int, **options: object) -> BatchReader:
    config = LoaderConfig(
        sources=(SourceConfig(place=str(place)),),
        context_length=context_length,
        batch_size=4,
        **options,  # type: ignore[arg-type]
    )
    return BatchReader(config)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_sample_has_its_tokens_and_documents(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    documents = random_documents(
        data.draw(st.integers(2, 200)), longest=data.draw(st.sampled_from([1, 7, 90]))
    )
    place = tmp_path_factory.mktemp("dataset")
    tokens = write_dataset(
        place,
        documents,
        shard_tokens=data.draw(st.integers(4, 90)),
        dtype=data.draw(st.sampled_from(["uint16", "uint32"])),
    )
    length = data.draw(st.integers(1, len(tokens) - 1))
    reader = make_reader(place, length, document_boundaries=True)
    (num_samples,) = reader.num_samples
    assert num_samples == (len(tokens) - 1) // length
    positions = np.arange(num_samples)
    batch = reader.read(positions)
    document_of = np.repeat(np.arange(len(documents)), [len(each) + 1 for each in documents])
    _, samples = reader.locate(positions)
    assert batch.positions is not None
    assert batch.document_ids is not None
    for row, sample in enumerate(samples.tolist()):
        window = slice(sample * length, sample * length + length)
        assert batch.tokens[row].tolist() == tokens[window].tolist()
        assert batch.targets[row].tolist() == tokens[window.start + 1 : window.stop + 1].tolist()
        own = document_of[window]
        assert batch.document_ids[row].tolist() == (own - own[0]).tolist()
        first_of = np.searchsorted(own, own)  # Where each token's document begins here.
        assert batch.positions[row].tolist() == (np.arange(length) - first_of).tolist()


def num_descriptors() -> int:
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))


def test_open_files_are_bounded(tmp_path: pathlib.Path) -> None:
    names = [f"{number}.tokens" for number in range(20)]
    for name in names:
        (tmp_path / name).write_bytes(b"\1\0\2\0")
    files = ShardFiles(lambda name: (tmp_path / name).open("rb"), most_open=3)
    opened = num_descriptors()
    for _ in range(2):
        for name in names:
            assert files.array(name, "uint16", 2).tolist() == [1, 2]
    assert num_descriptors() <= opened + 3
    files.close()
    assert num_descriptors() == opened


@pytest.mark.parametrize("size", [0, 126, 130])
def test_a_shard_of_another_size_is_named(tmp_path: pathlib.Path, size: int) -> None:
    write_dataset(tmp_path, random_documents(200))
    shard = tmp_path / "train" / "00000001.tokens"
    os.truncate(shard, size)
    with pytest.raises(
        DataError, match=rf"00000001.tokens: {size} bytes, but 128 in the manifest; .*verify"
    ):
        make_reader(tmp_path, 10).read(np.arange(19))


def test_a_shard_that_is_not_there_is_named(tmp_path: pathlib.Path) -> None:
    write_dataset(tmp_path, random_documents(200))
    (tmp_path / "train" / "00000002.tokens").unlink()
    with pytest.raises(DataError, match=r"00000002.tokens: No such file.*incomplete.*verify"):
        make_reader(tmp_path, 10).read(np.arange(19))


def test_datasets_without_what_is_asked_for_are_refused(tmp_path: pathlib.Path) -> None:
    write_dataset(tmp_path, random_documents(200))
    with pytest.raises(DataError, match=r"no split 'heldout'; it has train"):
        make_reader(tmp_path, 10, split="heldout")
    with pytest.raises(DataError, match=r"has 200 tokens, less than one sample of 201"):
        make_reader(tmp_path, 200)
    assert make_reader(tmp_path, 199).num_samples == [1]


def test_files_that_are_used_again_stay_open(tmp_path: pathlib.Path) -> None:
    opened: list[str] = []

    def open_file(name: str) -> BinaryIO:
        opened.append(name)
        (tmp_path / name).write_bytes(b"\1\0")
        return (tmp_path / name).open("rb")

    files = ShardFiles(open_file, most_open=2)
    for name in ("a", "b", "a", "c", "a", "b"):
        files.array(name, "uint16", 1)
    assert opened == ["a", "b", "c", "b"]
    files.close()
    files.array("b", "uint16", 1)
    assert opened[-2:] == ["b", "b"]


def test_the_files_of_samples_are_those_that_they_touch(tmp_path: pathlib.Path) -> None:
    write_dataset(tmp_path, random_documents(64), shard_tokens=10)
    (source,) = make_reader(tmp_path, 4)._sources
    # A sample has one token more than its context: that of tokens 8 to 12 ends in the next shard.
    for samples, shards in (([0], [0]), ([2], [0, 1]), ([1, 5], [0, 2]), ([2, 9], [0, 1, 3, 4])):
        assert source.samples.files_of(np.array(samples)) == [
            f"train/{shard:08d}.tokens" for shard in shards
        ]


def test_a_source_without_a_token_has_no_sample(tmp_path: pathlib.Path) -> None:
    manifest = SimpleNamespace(splits={"train": SimpleNamespace(num_tokens=0)})
    with pytest.raises(DataError, match="0 tokens, less than one sample of 2"):
        SplitSamples(cast(Any, manifest), "train", cast(Any, None), 1, url="x")


def test_datasets_have_the_same_digest_in_every_version() -> None:
    """Checkpoints name it: with another, no run could be resumed."""
    sources = [SimpleNamespace(manifest=SimpleNamespace(fingerprint=name)) for name in ("a", "b")]
    assert sources_digest(cast(Any, sources)) == "5c6dd92419da90390f1f6e36d6b45d32"


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[object] = []

    def fetch_ahead(self, names: list[str]) -> None:
        self.calls.append(names)

    def files_of(self, samples: np.ndarray) -> list[str]:
        return [str(sample) for sample in samples]

    def close(self) -> None:
        self.calls.append("close")


def test_a_source_fetches_and_closes_what_it_has() -> None:
    cache, files = _Recorder(), _Recorder()
    source = OpenSource(
        manifest=cast(Any, None),
        samples=cast(Any, _Recorder()),
        files=cast(Any, files),
        cache=cast(Any, cache),
    )
    source.fetch_ahead(np.array([3, 5]))
    source.close()
    assert (cache.calls, files.calls) == ([["3", "5"], "close"], ["close"])


# Shards of 100 tokens of 2 bytes; the split has 1,000 tokens.
@pytest.mark.parametrize(
    ("options", "cache_bytes", "expected"),
    [
        ({}, 2000, MOST_OPEN),
        ({}, 1999, "has space for .*; set a window"),
        ({"sources": 2}, 4000, MOST_OPEN),
        ({"sources": 2}, 3999, "set a window"),
        # 5 samples of 20 tokens are 1 shard, and 2 where they begin and end inside shards.
        ({"window": 5}, 1200, 3),
        ({"window": 5, "document_boundaries": True}, 1200, 6),
        ({"window": 5}, 1199, "the next one span 6 shards of 200 B"),
        ({"window": 9}, 1200, 3),
        ({"window": 10}, 1600, 4),
    ],
)
def test_a_cache_has_room_for_a_window_and_the_next(
    options: dict[str, Any], cache_bytes: int, expected: int | str
) -> None:
    num_sources = options.pop("sources", 1)
    config = LoaderConfig(
        sources=tuple(SourceConfig(place=f"s3://b/{number}") for number in range(num_sources)),
        cache_directory="cache",
        cache_bytes=cache_bytes,
        context_length=20,
        batch_size=4,
        **options,
    )
    manifest = SimpleNamespace(
        shard_tokens=100, token_bytes=2, splits={"train": SimpleNamespace(num_tokens=1000)}
    )
    storage = SimpleNamespace(url="s3://b/0")
    if isinstance(expected, int):
        assert _shards_in_use(cast(Any, storage), cast(Any, manifest), config) == expected
    else:
        with pytest.raises(UsageError, match=expected):
            _shards_in_use(cast(Any, storage), cast(Any, manifest), config)
