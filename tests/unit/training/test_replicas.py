"""Tests that each sample is read exactly once while replicas leave and join."""

import dataclasses
import itertools
import pathlib

import pytest
import torch

from paceline.parallel.elastic import Members
from paceline.training.config import RunConfig
from paceline.training.replicas import ReplicaData
from tests.distributed.small_runs import small_run

CPU = torch.device("cpu")


def _config(place: pathlib.Path, batch: str) -> RunConfig:
    config = small_run(place)
    parallel = dataclasses.replace(config.parallel, elastic="replicas", elastic_batch=batch)
    training = dataclasses.replace(config.training, batch_size=6)
    return dataclasses.replace(config, parallel=parallel, training=training)


def _rows(
    config: RunConfig, live: list[int], *, fails: frozenset[int] = frozenset()
) -> list[bytes]:
    """Returns the sequences of committed steps, with the numbers of replicas in `live`."""
    position = None
    found = []
    for number, replicas in enumerate(live):
        of_step = []
        for rank in range(replicas):
            # Each step uses new processes, which receive only the position.
            with ReplicaData(config, 3, CPU) as data:
                if position is not None:
                    data.load_state_dict(position)
                data.members = Members(rank=rank, live=replicas, has_healed=False)
                batch = next(data)
                if number in fails:
                    data.discard()
                    batch = next(data)
                of_step += [row.numpy().tobytes() for row in batch.tokens]
                data.commit()
                assert len(of_step) <= data.batch_size(replicas)
            after = data.state_dict()
        position = after
        found += of_step
    return found


@pytest.mark.parametrize("batch", ["kept", "live"])
def test_samples_come_in_one_order_whoever_takes_part(tmp_path: pathlib.Path, batch: str) -> None:
    config = _config(tmp_path, batch)
    changing = _rows(config, [3, 2, 1, 2, 3], fails=frozenset({1, 3}))
    alone = _rows(config, [3] * 5)
    sizes = [6, 6, 6, 6, 6] if batch == "kept" else [6, 4, 2, 4, 6]
    assert len(changing) == sum(sizes)
    assert changing == alone[: sum(sizes)]
    assert list(itertools.accumulate(sizes))[-1] == len(changing)


def test_what_was_read_ahead_does_not_count(tmp_path: pathlib.Path) -> None:
    with ReplicaData(_config(tmp_path, "kept"), 2, CPU) as data:
        first = next(data)
        assert data.num_samples == 0
        data.commit()
        assert data.num_samples == 6
        next(data)
        data.discard()
        assert data.num_samples == 6
        with ReplicaData(_config(tmp_path, "kept"), 2, CPU) as other:
            other.load_state_dict(data.state_dict())
            assert other.num_samples == 6
            assert not torch.equal(next(other).tokens, first.tokens)
