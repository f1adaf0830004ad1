"""Tests that torch wrappers give the loader's batches, also in workers of (Stateful)DataLoader."""

import dataclasses
import itertools
import pathlib
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from paceline.data.loader.batches import TokenSequences
from paceline.data.loader.config import LoaderConfig, SourceConfig
from paceline.data.loader.loader import TokenLoader
from paceline.data.loader.torch_batches import TokenDataset, TorchBatch, TorchLoader
from tests.unit.data.dataset_factory import random_documents, write_dataset


@pytest.fixture
def config(tmp_path: pathlib.Path) -> LoaderConfig:
    write_dataset(tmp_path, random_documents(1001))
    source = SourceConfig(place=str(tmp_path))
    return LoaderConfig(
        sources=(source,), context_length=10, batch_size=4, document_boundaries=True
    )


def expected_rows(config: LoaderConfig, number: int, **options: Any) -> list[Any]:
    with TokenLoader(config, **options) as loader:
        return [next(loader).tokens.tolist() for _ in range(number)]


def take(batches: Any, number: int) -> list[Any]:
    return [batch.tokens.tolist() for batch in itertools.islice(batches, number)]


def test_tensors_are_the_loaders_arrays(config: LoaderConfig) -> None:
    with (
        TorchLoader(config, rank=1, world_size=2) as ours,
        TokenLoader(config, rank=1, world_size=2) as loader,
    ):
        batch, expected = next(ours), next(loader)
        assert isinstance(batch, TorchBatch)
        for name in ("tokens", "targets", "positions", "document_ids"):
            tensor = getattr(batch, name)
            assert tensor.dtype == torch.int64
            assert np.array_equal(tensor.numpy(), getattr(expected, name))
        assert (batch.step, batch.first_sample, batch.digest) == (0, 2, expected.digest)
        state = ours.state_dict()
        assert state == loader.state_dict()
        second = next(ours)
        ours.load_state_dict(state)
        assert torch.equal(next(ours).tokens, second.tokens)


@pytest.mark.gpu
def test_batches_come_to_the_gpu_whole(config: LoaderConfig) -> None:
    with TorchLoader(config, device="cuda") as ours:
        rows = take(ours, 50)
    assert rows == expected_rows(config, 50)


def test_a_dataset_resumes_without_workers(config: LoaderConfig) -> None:
    dataset = TokenDataset(config)
    assert take(DataLoader(dataset, batch_size=None), 3) == expected_rows(config, 3)
    state = dataset.state_dict()
    assert state["consumed_samples"] == 12
    again = TokenDataset(config)
    again.load_state_dict(state)
    assert take(DataLoader(again, batch_size=None), 4) == expected_rows(config, 7)[3:]


def test_workers_take_turns(config: LoaderConfig) -> None:
    rows = expected_rows(config, 9)
    dataset = TokenDataset(config)
    assert take(DataLoader(dataset, batch_size=None, num_workers=2), 5) == rows[:5]
    with TokenLoader(config) as loader:
        next(loader)
        dataset.load_state_dict(loader.state_dict())
    assert take(DataLoader(dataset, batch_size=None, num_workers=2), 5) == rows[1:6]


def test_a_map_of_sequences_is_a_dataset(config: LoaderConfig) -> None:
    batches = DataLoader(TokenSequences(config), batch_size=4)  # type: ignore[arg-type]
    rows = [batch["tokens"].tolist() for batch in itertools.islice(batches, 5)]
    assert rows == expected_rows(config, 5)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stateful_data_loader_resumes(config: LoaderConfig, num_workers: int) -> None:
    torchdata = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata has the StatefulDataLoader"
    )

    def make() -> Any:
        return torchdata.StatefulDataLoader(
            TokenDataset(config), batch_size=None, num_workers=num_workers
        )

    rows = expected_rows(config, 8)
    first = make()
    assert take(first, 3) == rows[:3]
    state = pickle.loads(pickle.dumps(first.state_dict()))
    second = make()
    second.load_state_dict(state)
    assert take(second, 5) == rows[3:]


def test_a_loader_that_is_left_ends_its_thread(config: LoaderConfig) -> None:
    with TorchLoader(dataclasses.replace(config, prefetch=2)) as ours:
        next(ours)
        assert [each for each in threading.enumerate() if each.name == "prefetch-batches"]
    assert not [each for each in threading.enumerate() if each.name == "prefetch-batches"]


def test_a_dataset_that_was_read_takes_over_a_state(config: LoaderConfig) -> None:
    dataset = TokenDataset(config)
    take(dataset, 5)
    state = TokenDataset(config).state_dict() | {"consumed_samples": 8}
    dataset.load_state_dict(state)
    assert dataset.state_dict() == state
