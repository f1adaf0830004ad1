"""Tests of the comparison of data loaders, on a few small shards."""

import pathlib

import pytest

pytest.importorskip("torchdata", reason="the loader is compared with torchdata's")

from studies.data import loader_speed


def test_all_ways_read_the_same(tmp_path: pathlib.Path) -> None:
    loader_speed.write_dataset(tmp_path, 3, 2**15)
    seconds = loader_speed.time_ways(tmp_path, rounds=2, num_batches=2)
    assert set(seconds) == {"bare", "loader", "digests", "prefetch", "torchdata"}
    assert all(len(samples) == 2 for samples in seconds.values())


def test_both_states_are_resumed(tmp_path: pathlib.Path) -> None:
    loader_speed.write_dataset(tmp_path, 3, 2**15)
    numbers = loader_speed.resume_numbers(tmp_path, 64, rounds=1)
    assert numbers["own"]["state_bytes"].value < 500
    assert numbers["torchdata"]["resume_time_s"].value > 0
