"""Tests of counting documents by length across shards, and of excerpts."""

import collections
import pathlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.inspect import document_beginnings, document_lengths
from paceline.data.manifest import read_manifest
from paceline.data.storage import LocalStorage
from tests.unit.data.dataset_factory import write_dataset


@settings(deadline=None)  # Writing files is slow on a busy machine.
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30), shard=st.integers(1, 50))
def test_every_document_counts_once(
    tmp_path_factory: "object", lengths: list[int], shard: int
) -> None:
    directory = tmp_path_factory.mktemp("dataset")  # type: ignore[attr-defined]
    write_dataset(directory, [np.ones(length) for length in lengths], shard_tokens=shard)
    storage = LocalStorage(directory)
    found = document_lengths(storage, read_manifest(storage), "train")
    # Each document is followed by its end token.
    expected = collections.Counter((length + 1).bit_length() - 1 for length in lengths)
    assert {place: count for place, count in enumerate(found.counts) if count} == dict(expected)
    assert found.num_documents == len(lengths)
    assert found.num_tokens == sum(lengths) + len(lengths)
    assert found.longest == max(lengths) + 1
    assert len(found.counts) == (max(lengths) + 1).bit_length()
    middle = sorted(length + 1 for length in lengths)[(len(lengths) - 1) // 2]
    assert found.median_bin == middle.bit_length() - 1


def test_beginnings_are_spread_over_the_documents(tmp_path: pathlib.Path) -> None:
    write_dataset(tmp_path, [np.full(9, number) for number in range(11)], shard_tokens=200)
    storage = LocalStorage(tmp_path)
    manifest = read_manifest(storage)
    shown = [each.tolist() for each in document_beginnings(storage, manifest, "train", 3, 4)]
    assert shown == [[0] * 4, [5] * 4, [10] * 4]
    whole = document_beginnings(storage, manifest, "train", 1, 99)
    assert [each.tolist() for each in whole] == [[0] * 9]
    assert len(list(document_beginnings(storage, manifest, "train", 99, 4))) == 11
