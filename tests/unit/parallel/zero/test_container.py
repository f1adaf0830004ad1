"""The container itself: its messages' dtypes, its statistics, its lifetime and its errors."""

import copy
import dataclasses
import gc
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor

from paceline.core.errors import UsageError
from paceline.parallel import ShardedDataParallel, ShardedOptimizer
from paceline.parallel.zero import container as container_module
from paceline.parallel.zero.bucket import find_sharded_parameters
from tests.unit.parallel.zero.layers import Model, Raw, loss_of
from tests.unit.parallel.zero.ranks import ONE_EACH, Parts, Twins, on_ranks, zero_ranks

pytestmark = pytest.mark.filterwarnings("ignore::paceline.parallel.OverlapWarning")


@pytest.mark.parametrize(
    ("keywords", "in_place", "expected"),
    [
        ({}, False, "bfloat16"),
        ({}, True, "bfloat16"),
        ({"master_dtype": torch.float32}, False, "bfloat16"),
        ({"master_dtype": torch.float32}, True, "float32"),
        ({"reduction_dtype": torch.float64}, False, "float64"),
        ({"reduction_dtype": torch.float64, "master_dtype": torch.float32}, True, "float64"),
        ({"reduction_dtype": torch.float32}, True, "float32"),
    ],
)
def test_the_dtype_of_messages(keywords: dict[str, Any], in_place: bool, expected: str) -> None:
    """Ranks that sum what they received do so in the master's dtype; NCCL sums in the message's."""
    with (
        zero_ranks(2) as ranks,
        mock.patch.object(container_module, "works_in_place", return_value=in_place),
    ):

        def program(rank: int) -> None:
            ours = ShardedDataParallel(Parts(dtype=torch.bfloat16), None, **keywords)
            ours(rank, 0).backward()
            ours.clip_grad_norm_(1.0)
            sent = [event for event in ranks.events[rank] if "reduce-scatter" in event]
            assert sent[0] == f"send reduce-scatter 64 {expected}"

        ranks.run(program)


def test_waits_for_parameters_count_as_exposed() -> None:
    def program(rank: int) -> None:
        ours = ShardedDataParallel(Model(), ONE_EACH)
        sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.01)
        assert ours.synchronization_stats() is None
        for number in range(2):
            if number == 1:
                ours.record_statistics()
            loss_of(ours, rank, number).backward()
            assert (ours.synchronization_stats() is None) == (number == 0)
            sharded.step()
            sharded.zero_grad()
        waits = [flat.arriving for flat in ours._shared.flats]
        assert all(arriving.is_timed for arriving in waits)
        loss_of(ours, rank, 2).backward()
        assert len(ours._forward_waits) == 6
        assert not any(arriving.waits for arriving in waits)
        stats = ours.synchronization_stats()
        ours._forward_waits = []
        without = ours.synchronization_stats()
        assert stats is not None
        assert without is not None
        assert stats.exposed_wait_s > without.exposed_wait_s
        ours._forward_waits = [(1.0, 3.0), (5.0, 5.5)]
        stats = ours.synchronization_stats()
        assert stats is not None
        assert stats.exposed_wait_s == pytest.approx(without.exposed_wait_s + 2.5)
        assert stats.buckets == without.buckets
        # A forward pass that waited for nothing.
        loss_of(ours, rank, 3).backward()
        assert ours._forward_waits == []
        ours.record_statistics(False)
        sharded.step()
        sharded.zero_grad()
        loss_of(ours, rank, 4).backward()
        assert ours.synchronization_stats() is None
        sharded.zero_grad()

    on_ranks(2, program)


def test_statistics_that_are_turned_off_time_no_waits() -> None:
    def program(_rank: int) -> None:
        ours = ShardedDataParallel(Model(), ONE_EACH)
        ours.record_statistics(False)
        assert not any(flat.arriving.is_timed for flat in ours._shared.flats)

    on_ranks(2, program)


def test_statistics_whose_waits_are_unknown_stay_so() -> None:
    def program(rank: int) -> None:
        twins = Twins(rank, 2)
        twins.ours.record_statistics()
        twins.backward(0)
        stats = twins.ours.synchronization_stats()
        assert stats is not None
        with mock.patch.object(
            container_module.DataParallel,
            "synchronization_stats",
            return_value=dataclasses.replace(stats, exposed_wait_s=None),
        ):
            unknown = twins.ours.synchronization_stats()
        assert unknown is not None
        assert unknown.exposed_wait_s is None
        twins.sharded.zero_grad()

    on_ranks(2, program)


def test_a_pass_after_one_without_an_optimizer_is_refused() -> None:
    def program(rank: int) -> None:
        ours = ShardedDataParallel(Model())
        for _ in range(2):  # Passes that are not averaged need no optimizer.
            with ours.no_sync():
                loss_of(ours, rank, 0).backward()
        ours.zero_grad()
        with torch.no_grad():
            loss_of(ours, rank, 0)
        loss_of(ours, rank, 0).backward()
        ours.clip_grad_norm_(1.0)
        with pytest.raises(UsageError, match="no ShardedOptimizer updates the shards"):
            loss_of(ours, rank, 1)
        sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.1)
        loss_of(ours, rank, 1).backward()
        sharded.zero_grad()
        del sharded
        gc.collect()
        with pytest.raises(UsageError, match="no ShardedOptimizer updates the shards"):
            loss_of(ours, rank, 2)

    on_ranks(2, program)


def test_parameters_without_shards_must_not_be_trained() -> None:
    def program(rank: int) -> None:
        model = Model()
        model.end.weight.requires_grad_(False)
        ours = ShardedDataParallel(model, ONE_EACH)
        sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.01)
        for number in range(2):
            loss_of(ours, rank, number).backward()
            sharded.step()
            sharded.zero_grad()
        assert bool((model.end.weight == 4).all())
        # A known parameter may be frozen and trained again.
        for trained in (False, True):
            model.start.weight.requires_grad_(trained)
            loss_of(ours, rank, 2).backward()
            sharded.zero_grad()
        model.end.weight.requires_grad_(True)
        with pytest.raises(
            UsageError, match=r"parameter 'end.weight' was frozen or not in the mod"
        ):
            loss_of(ours, rank, 3)
        model.end.weight.requires_grad_(False)
        model.extra = Raw(1.0)
        with pytest.raises(UsageError, match=r"'extra.weight' .* wrap the model again"):
            loss_of(ours, rank, 3)

    on_ranks(2, program)


def test_a_container_has_one_optimizer() -> None:
    def program(_rank: int) -> None:
        ours = ShardedDataParallel(Model(), ONE_EACH)
        parameters = list(ours.parameters())
        with pytest.raises(UsageError, match="works only with an elementwise optimizer"):
            ShardedOptimizer(parameters, Adafactor)
        first = ShardedOptimizer(parameters[:2], SGD, lr=0.1)
        first.add_param_group({"params": parameters[2:]})
        with pytest.raises(UsageError, match="already belong to another ShardedOptimizer"):
            ShardedOptimizer(parameters, SGD, lr=0.1)
        # One that only a reference cycle holds is gone.
        first.cycle = first  # type: ignore[attr-defined]
        gc.disable()
        try:
            del first
            ShardedOptimizer(parameters, SGD, lr=0.1)
        finally:
            gc.enable()

    on_ranks(2, program)


def test_a_second_optimizer_collects_no_garbage_without_a_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Collecting takes long in a large program."""
    collected: list[int] = []

    def program(rank: int) -> None:
        ours = ShardedDataParallel(Model(), ONE_EACH)
        monkeypatch.setattr(gc, "collect", lambda *_: collected.append(rank))
        sharded = ShardedOptimizer(list(ours.parameters())[:2], SGD, lr=0.1)
        sharded.add_param_group({"params": list(ours.parameters())[2:]})

    on_ranks(2, program)
    assert not collected


def test_only_a_containers_parameters_have_a_container() -> None:
    def program(_rank: int) -> None:
        ours = ShardedDataParallel(Model(), ONE_EACH)
        parameter = next(ours.parameters())
        assert find_sharded_parameters(parameter) is ours._shared
        assert find_sharded_parameters(nn.Parameter(torch.ones(1))) is None
        del ours
        gc.collect()
        assert find_sharded_parameters(parameter) is None

    on_ranks(1, program)


def test_a_copy_of_the_module_has_idle_hooks() -> None:
    def program(rank: int) -> None:
        ours = ShardedDataParallel(Model(), ONE_EACH)
        sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.01)
        loss_of(ours, rank, 0).backward()
        sharded.step()
        ours.wait_for_parameters()
        average = copy.deepcopy(ours.module)
        loss_of(ours, rank, 1).backward()
        sharded.step()
        loss_of(average, rank, 0).backward()
        average.load_state_dict(average.state_dict())
        assert ours._shared.are_in_flight
        ours.wait_for_parameters()

    on_ranks(2, program)


def test_a_module_that_outlives_its_container_is_plain() -> None:
    def program(rank: int) -> None:
        ours = ShardedDataParallel(Model(), ONE_EACH)
        model = ours.module
        loss_of(ours, rank, 0).backward()
        ours.clip_grad_norm_(1.0)
        del ours
        gc.collect()
        model.zero_grad()
        loss_of(model, rank, 0).backward()
        model.load_state_dict(model.state_dict())
        SGD(model.parameters(), lr=0.1).step()

    on_ranks(2, program)


def test_settings_that_differ_between_ranks_are_named() -> None:
    def program(rank: int) -> None:
        dtype = torch.float32 if rank else None
        with pytest.raises(Exception, match="master"):
            ShardedDataParallel(Parts(dtype=torch.bfloat16), master_dtype=dtype)

    on_ranks(2, program)


def test_a_graph_of_old_values_is_refused() -> None:
    def program(rank: int) -> None:
        twins = Twins(rank, 2)
        loss = twins.ours(rank, 0)
        loss.backward(retain_graph=True)
        twins.sharded.step()
        twins.ours.wait_for_parameters()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    on_ranks(1, program)
