"""Tests that sequences by position equal those of the loader, in any process."""

import dataclasses
import pathlib
import pickle

import numpy as np
import pytest

from paceline.data.loader.batches import TokenSequences
from paceline.data.loader.config import LoaderConfig, SourceConfig
from paceline.data.loader.loader import TokenLoader
from tests.unit.data.dataset_factory import random_documents, write_dataset


@pytest.fixture
def config(tmp_path: pathlib.Path) -> LoaderConfig:
    write_dataset(tmp_path, random_documents(401))
    source = SourceConfig(place=str(tmp_path))
    return LoaderConfig(sources=(source,), context_length=10, batch_size=4)


def test_they_are_the_loaders(config: LoaderConfig) -> None:
    sequences = TokenSequences(config)
    assert len(sequences) == 40
    with TokenLoader(config) as loader:
        expected = np.concatenate([next(loader).tokens for _ in range(10)])
    travelled = pickle.loads(pickle.dumps(sequences))
    assert [item["tokens"].tolist() for item in travelled] == expected.tolist()
    picked = sequences.__getitems__([7, 3])
    assert [item["tokens"].tolist() for item in picked] == expected[[7, 3]].tolist()
    assert set(picked[0]) == {"tokens", "targets"}


def test_boundaries_and_length_are_as_asked_for(config: LoaderConfig) -> None:
    sequences = TokenSequences(
        dataclasses.replace(config, document_boundaries=True), num_samples=10**9
    )
    assert len(sequences) == 10**9
    assert set(sequences[10**9 - 1]) == {"tokens", "targets", "positions", "document_ids"}
    for position in (-1, 10**9):
        with pytest.raises(IndexError, match=str(position)):
            sequences[position]
