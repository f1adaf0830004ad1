"""Tests of a bucket that refuses, throttles, cuts off and mixes up its answers."""

import itertools
import os
import pathlib
from collections.abc import Iterator

import pytest

from paceline.checkpoint.catalog import verify_checkpoint
from paceline.core.errors import DataError
from paceline.data.loader.config import LoaderConfig, SourceConfig
from paceline.data.loader.loader import TokenLoader
from paceline.data.storage import Storage, open_storage
from tests.unit.checkpoint.runs import SmallRun, equal, save_steps
from tests.unit.data.dataset_factory import random_documents, write_dataset
from tests.unit.data.faulty_server import FaultyServer, faulty_server
from tests.unit.data.s3_server import s3_server

CONTENT = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server() as bucket:
        yield bucket


@pytest.fixture
def faulty(bucket: str) -> Iterator[FaultyServer]:
    with faulty_server() as faulty:
        yield faulty


@pytest.fixture
def storage(bucket: str, faulty: FaultyServer) -> Storage:
    storage = open_storage(f"{bucket}/{os.urandom(4).hex()}")
    storage.write("object", CONTENT)
    return storage


@pytest.mark.parametrize("fault", ["throttle", "cut"])
def test_what_passes_is_waited_for(storage: Storage, faulty: FaultyServer, fault: str) -> None:
    with faulty.failing(fault, times=2):
        assert storage.read("object") == CONTENT
        assert faulty.num_faults == 2
    with faulty.failing(fault, times=2):
        assert storage.read_range("object", 100, 300) == CONTENT[100:300]
    if fault == "throttle":
        with faulty.failing(fault, times=2):
            storage.write("other", CONTENT)
        with faulty.failing(fault, times=2):
            assert set(storage.sizes()) == {"object", "other"}
        with faulty.failing(fault, times=2):
            assert not storage.create("other", b"another")
        assert storage.read("other") == CONTENT


@pytest.mark.parametrize("fault", ["throttle", "cut"])
def test_what_lasts_is_one_error_and_never_half_an_object(
    storage: Storage, faulty: FaultyServer, fault: str
) -> None:
    with faulty.failing(fault):
        with pytest.raises(DataError, match=r"s3://.*/object: .*4 times; check AWS_ENDPOINT_URL"):
            storage.read("object")
        with pytest.raises(DataError, match="/object: "):
            storage.read_range("object", 100, 300)


def test_missing_rights_are_named_at_once(storage: Storage, faulty: FaultyServer) -> None:
    with faulty.failing("refuse"):
        with pytest.raises(DataError, match=r"/object: the server refuses .* rights"):
            storage.read("object")
        assert faulty.num_faults == 1
        with pytest.raises(DataError, match=r"/other: the server refuses .* rights"):
            storage.write("other", b"content")
        with pytest.raises(DataError, match="the server refuses"):
            storage.sizes()


def test_the_shard_of_another_is_not_read(
    bucket: str, faulty: FaultyServer, tmp_path: pathlib.Path
) -> None:
    place = f"{bucket}/{os.urandom(4).hex()}"
    write_dataset(place, random_documents(3000), shard_tokens=1000)
    config = LoaderConfig(
        sources=(SourceConfig(place=place),),
        cache_directory=str(tmp_path),
        context_length=20,
        batch_size=50,
    )
    with faulty.failing("swap", ending="00000001.tokens"), TokenLoader(config) as loader:
        batches = itertools.islice(loader, 3)  # An epoch needs every shard.
        with pytest.raises(DataError, match=r"00000001\.tokens"):
            list(batches)
    with TokenLoader(config) as loader:
        assert len(next(loader).rows) == 50


def test_a_mixed_up_checkpoint_is_passed_over(bucket: str, faulty: FaultyServer) -> None:
    place = f"{bucket}/{os.urandom(4).hex()}"
    saved = save_steps(place, [1, 2])
    with faulty.failing("swap", ending=".safetensors"):
        assert all(verify_checkpoint(place, step) for step in (1, 2))
    with faulty.failing("swap", times=1, ending=".safetensors"):
        run = SmallRun(seed=9)
        restored = run.load(place)
    assert faulty.num_faults == 1
    assert restored is not None
    assert equal(run.numbers(), saved[restored.step])
