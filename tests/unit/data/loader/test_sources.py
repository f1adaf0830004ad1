"""Tests that samples have the right tokens across shards, and that damage is named."""

import os
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import DataError
from paceline.data.loader.batches import BatchReader
from paceline.data.loader.config import LoaderConfig, SourceConfig
from paceline.data.loader.sources import ShardFiles
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
