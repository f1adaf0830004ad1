"""A bit flip on one rank is found, the rank is named, and the run stops or rolls back."""

import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.checkpoint.catalog import list_checkpoints
from paceline.parallel import RankPool
from paceline.training.config import RunConfig
from tests.distributed.faulty_runs import BitFlip, events_of, saved_tensors, train_faulty
from tests.distributed.small_runs import changed, losses_of, small_run

Pools = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    place = tmp_path_factory.mktemp("watched")
    return changed(
        small_run(place),
        "run",
        training={"steps": 8},
        checkpoint={"every_steps": 4},
        watch={"hash_every_steps": 3},
    )


@pytest.mark.parametrize("where", ["weights", "state"])
def test_the_rank_in_the_minority_is_named(config: RunConfig, rank_pool: Pools, where: Any) -> None:
    faulty = changed(config, f"minority-{where}")
    flip = BitFlip(rank=1, step=2, where=where, tensor=2, bit=22)
    expected = r"step 3: rank 1 differs from 2 of 3 ranks, first in \S"
    for message in rank_pool(3).run(train_faulty, faulty, (flip,)):
        assert re.search(expected, message)
    (event,) = events_of(faulty, "corrupted")
    assert event.step == 3


def test_two_ranks_that_differ_are_both_named(config: RunConfig, rank_pool: Pools) -> None:
    flip = BitFlip(rank=0, step=1, tensor=3, bit=5)
    messages = rank_pool(2).run(train_faulty, changed(config, "two"), (flip,))
    assert all("ranks 0 and 1 differ, first in" in each for each in messages)


def test_a_flip_that_no_step_can_be_taken_with_is_not_taken_for_divergence(
    config: RunConfig, rank_pool: Pools
) -> None:
    rare = changed(config, "exponent", watch={"hash_every_steps": 1000})
    flip = BitFlip(rank=1, step=2, tensor=-1, bit=30)  # A small weight becomes a huge one.
    messages = rank_pool(3).run(train_faulty, rare, (flip,))
    assert all("rank 1 differs from 2 of 3 ranks" in each for each in messages)


def test_nothing_damaged_is_saved(config: RunConfig, rank_pool: Pools) -> None:
    late = changed(config, "late", watch={"hash_every_steps": 1000})
    messages = rank_pool(3).run(train_faulty, late, (BitFlip(rank=2, step=3),))
    assert all("found at step 4: rank 2 differs" in each for each in messages)
    assert not list_checkpoints(pathlib.Path(late.out) / "checkpoints")


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp", "torch_fsdp2"])
@pytest.mark.parametrize("where", ["weights", "state"])
def test_at_rest_a_rank_names_itself(
    config: RunConfig, rank_pool: Pools, strategy: str, where: Any
) -> None:
    faulty = changed(
        config,
        f"rest-{strategy}-{where}",
        parallel={"strategy": strategy},
        watch={"hash_every_steps": 0, "hash_at_rest": True},
    )
    flip = BitFlip(rank=1, step=2, where=where, tensor=5, bit=3)
    for message in rank_pool(2).run(train_faulty, faulty, (flip,)):
        assert re.search(r"found at step 2: rank 1: \S.* has changed since", message)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_rolled_back_a_run_is_as_if_nothing_had_happened(
    config: RunConfig, rank_pool: Pools, strategy: str
) -> None:
    whole = changed(config, f"whole-{strategy}", parallel={"strategy": strategy})
    rank_pool(2).run(train_faulty, whole)
    back = changed(
        config,
        f"back-{strategy}",
        parallel={"strategy": strategy},
        watch={"hash_at_rest": True, "on_corruption": "rollback"},
    )
    rank_pool(2).run(train_faulty, back, (BitFlip(rank=1, step=6, where="state", bit=30),))
    assert losses_of(back) == losses_of(whole)
    assert len(losses_of(back)) == 8
    (event,) = events_of(back, "corrupted")
    assert event.step == 4
    assert event.message.startswith("found at step 6: rank 1: ")
    expected = saved_tensors(whole, 8)
    assert expected
    for name, values in saved_tensors(back, 8).items():
        assert torch.equal(values, expected.pop(name))
    assert not expected


def test_without_a_checkpoint_a_run_stops(config: RunConfig, rank_pool: Pools) -> None:
    early = changed(config, "early", watch={"on_corruption": "rollback"})
    messages = rank_pool(3).run(train_faulty, early, (BitFlip(rank=1, step=1),))
    assert all("corruption found at step 3" in each for each in messages)
