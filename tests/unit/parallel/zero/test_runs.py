"""Neighbouring shards that the optimizer sees as one tensor, and when they are separated."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW

from paceline.parallel import ShardedDataParallel, ShardedOptimizer
from paceline.parallel.zero import optimizer as optimizer_module
from paceline.parallel.zero.flat_parameters import FlatParameters, Shard
from paceline.parallel.zero.shard_optimizer import Run, join_neighbours, single
from tests.unit.parallel.zero.flats import make_flat
from tests.unit.parallel.zero.ranks import DECAYING, ONE_EACH, Parts, Twins, on_ranks, zero_ranks

pytestmark = pytest.mark.filterwarnings("ignore::paceline.parallel.OverlapWarning")


def _shards(flat: FlatParameters, *names: str) -> list[Shard]:
    known = {id(p): name for p, name in zip(flat.parameters, flat.names, strict=True)}
    return [shard for shard in flat.shards if known[id(shard.parameter)] in names]


def _runs(flat: FlatParameters, *names: str) -> list[Run]:
    return join_neighbours(flat, _shards(flat, *names))


@pytest.mark.parametrize("master_dtype", [None, torch.float64])
def test_neighbours_are_joined(master_dtype: torch.dtype | None) -> None:
    flat = make_flat(1, master_dtype=master_dtype)
    (run,) = _runs(flat, "p2", "p1", "p0")
    assert not run.is_one_shard
    assert (run.begin, run.offsets) == (0, [0, 4, 8])
    assert run.tensor.shape == (14,)
    assert run.tensor.data_ptr() == flat.master.data_ptr()
    assert run.shards == flat.shards
    (run,) = _runs(flat, "p1", "p0")
    assert (run.begin, run.offsets) == (4, [4, 8])
    assert run.tensor.shape == (10,)
    assert run.tensor.data_ptr() == flat.master[4:].data_ptr()
    # Not the padding after the last one.
    (run,) = _runs(flat, "p2", "p1")
    assert (run.begin, run.tensor.shape) == (0, (7,))
    first, second = _runs(flat, "p2", "p0")
    for run, shard in ((first, flat.shards[0]), (second, flat.shards[2])):
        assert run.is_one_shard
        assert run.tensor is shard.tensor
        assert run.shards == [shard]
    assert _runs(flat) == []


def test_several_runs_of_one_group() -> None:
    flat = make_flat(0, num_ranks=1, sizes=(4,) * 6)
    runs = _runs(flat, "p5", "p4", "p2", "p0")
    assert [(len(run.shards), run.tensor.numel()) for run in runs] == [(2, 8), (1, 4), (1, 4)]
    runs = _runs(flat, "p5", "p3", "p2", "p1")
    assert [(len(run.shards), run.tensor.numel()) for run in runs] == [(1, 4), (3, 12)]
    assert runs[1].begin == 8


def test_single_shards() -> None:
    flat = make_flat(1)
    for run, shard in zip(single(flat, flat.shards), flat.shards, strict=True):
        assert run.is_one_shard
        assert run.tensor is shard.tensor
        state = {"step": torch.tensor(3.0), "sum": torch.ones(4)}
        assert run.state_of(shard, state) == state
        assert run.state_of(shard, state) is not state
        assert run.can_join({shard: state})
        joined = run.join_states({shard: state})
        assert joined == state
        assert joined is not state
        # It is one tensor for the optimizer, so it begins at its own first element.
        assert run.begin == 0


def _three_runs_states() -> tuple[Run, dict[str, Any]]:
    (run,) = _runs(make_flat(1), "p2", "p1", "p0")
    state = {
        "step": torch.tensor(3.0),
        "sum": torch.arange(14.0),
        "row": torch.arange(5.0),
        "count": 4,
    }
    return run, state


def test_a_runs_state_is_cut_and_joined() -> None:
    run, state = _three_runs_states()
    states = {shard: run.state_of(shard, state) for shard in run.shards}
    assert [states[shard]["sum"].tolist() for shard in run.shards] == [
        [0, 1],
        [4, 5, 6],
        [8, 9, 10, 11, 12, 13],
    ]
    for each in states.values():
        assert each["step"] is state["step"]
        assert each["row"] is state["row"]
        assert each["count"] == 4
    assert run.can_join(states)
    joined = run.join_states(states)
    assert list(joined) == list(state)
    # The padding between shards begins at zero.
    assert joined["sum"].tolist() == [0, 1, 0, 0, 4, 5, 6, 0, 8, 9, 10, 11, 12, 13]
    assert joined["sum"].dtype == torch.float32
    assert (joined["step"], joined["count"]) == (state["step"], 4)
    assert torch.equal(joined["row"], state["row"])


def test_a_run_may_begin_anywhere_in_its_flat() -> None:
    (run,) = _runs(make_flat(1), "p1", "p0")
    state = {"sum": torch.arange(10.0)}
    states = {shard: run.state_of(shard, state) for shard in run.shards}
    assert [states[shard]["sum"].tolist() for shard in run.shards] == [
        [0, 1, 2],
        [4, 5, 6, 7, 8, 9],
    ]
    assert run.join_states(states)["sum"].tolist() == [0, 1, 2, 0, 4, 5, 6, 7, 8, 9]


def test_a_step_count_is_no_piece_even_if_it_has_the_size_of_a_run() -> None:
    (run,) = _runs(make_flat(1), "p2", "p1")
    state = {"step": torch.full((7,), 2.0)}
    assert run.state_of(run.shards[0], state)["step"] is state["step"]
    sized = {shard: {"step": torch.full(shard.tensor.shape, 2.0)} for shard in run.shards}
    assert run.join_states(sized)["step"].shape == (2,)


DIFFERENCES: dict[str, tuple[dict[str, Any], bool]] = {
    "nothing": ({}, True),
    "per-element state": ({"sum": torch.tensor([7.0, 8.0, 9.0])}, True),
    "the step count": ({"step": torch.tensor(4.0)}, False),
    "the step count's elements": ({"step": torch.tensor([3.0, 4.0])}, False),
    "a number": ({"count": 5}, False),
    "a scalar": ({"scale": torch.tensor(0.5)}, False),
    "an equal scalar": ({"scale": torch.tensor(0.25)}, True),
    "more state": ({"more": 1}, False),
}


@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_only_shards_of_equal_state_are_joined(difference: str, place: int) -> None:
    run, _ = _three_runs_states()
    states: dict[Any, dict[str, Any]] = {
        shard: {
            "step": torch.tensor(3.0),
            "count": 4,
            "scale": torch.tensor(0.25),
            "sum": torch.full(shard.tensor.shape, float(index)),
        }
        for index, shard in enumerate(run.shards)
    }
    change, expected = DIFFERENCES[difference]
    states[run.shards[place]].update(change)
    assert run.can_join(states) == expected
    del states[run.shards[place]]["count"]
    assert not run.can_join(states)


def test_a_step_count_with_elements_must_be_equal_too() -> None:
    run, _ = _three_runs_states()
    states = {shard: {"step": torch.tensor([3.0, 3.0])} for shard in run.shards}
    assert run.can_join(states)
    states[run.shards[1]]["step"] = torch.tensor([3.0, 4.0])
    assert not run.can_join(states)


def _tensors(sharded: ShardedOptimizer) -> list[Tensor]:
    return [
        tensor
        for part in sharded.parts
        if part.inner is not None
        for group in part.inner.param_groups
        for tensor in group["params"]
    ]


ADAMW: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}


def test_a_run_is_split_when_only_some_shards_have_gradients() -> None:
    """From then on the steps of its shards are counted separately."""

    def program(rank: int) -> None:
        twins = Twins(rank, 1, bucket_size_mb=None, optimizer_cls=AdamW, options=ADAMW)
        everything = tuple(range(5))
        (whole,) = _tensors(twins.sharded)
        for number, used in enumerate((everything, everything, (0, 2, 4), everything)):
            twins.backward(number, used)
            twins.step()
            twins.require_equal()
            tensors = _tensors(twins.sharded)
            if number < 2:
                assert len(tensors) == 1
                assert tensors[0] is whole
                assert list(twins.sharded.state) == [whole]
            else:
                assert tensors == [shard.tensor for shard in twins.sharded.shards()]
                assert set(twins.sharded.state) == set(tensors)
        steps = [int(twins.sharded.state[shard.tensor]["step"]) for shard in twins.sharded.shards()]
        assert steps == [4, 3, 4, 3, 4]
        # Each shard's state is its own: the run's would be kept alive and updated together.
        storages = {
            state["exp_avg"].untyped_storage().data_ptr() for state in twins.sharded.state.values()
        }
        assert len(storages) == 5

    on_ranks(1, program)


def test_only_the_run_with_a_missing_gradient_is_split() -> None:
    def program(rank: int) -> None:
        twins = Twins(rank, 2, optimizer_cls=AdamW, options=ADAMW)
        everything = tuple(range(5))
        for number, used in enumerate((everything, (0, 2, 3, 4), everything)):
            twins.backward(number, used, used)
            twins.step()
            twins.require_equal()
        # Its bucket has two parameters, of which this rank may have parts of both or of one.
        num_shards = len(list(twins.sharded.shards()))
        num_in_split = len(twins.flats[0].shards)
        num_in_whole = sum(bool(flat.shards) for flat in twins.flats[1:])
        assert len(_tensors(twins.sharded)) == num_in_split + num_in_whole <= num_shards

    on_ranks(2, program)


def test_a_run_without_any_gradient_stands_still() -> None:
    def program(rank: int) -> None:
        twins = Twins(rank, 1, options=DECAYING)
        twins.backward(0)
        twins.step()
        twins.backward(1, (2, 3, 4))
        twins.step()
        twins.require_equal()
        assert len(_tensors(twins.sharded)) == 3

    on_ranks(1, program)


def test_a_run_before_its_first_step_is_split_without_state() -> None:
    def program(rank: int) -> None:
        twins = Twins(rank, 1, bucket_size_mb=None, options=DECAYING)
        twins.backward(0, (0, 1))
        twins.step()
        twins.require_equal()
        assert len(twins.sharded.state) == 2
        assert all(twins.sharded.state.values())

    on_ranks(1, program)


def test_groups_are_runs_of_their_own() -> None:
    def program(_rank: int) -> None:
        model = Parts()
        ours = ShardedDataParallel(model, None)
        values = [part.value for part in model.parts]
        groups = [
            {"params": [values[4], values[3], values[1]]},
            {"params": [values[2], values[0]], "lr": 0.01},
        ]
        sharded = ShardedOptimizer(groups, SGD, lr=0.1)
        (part,) = sharded.parts
        assert part.inner is not None
        sizes = [
            [tensor.numel() for tensor in group["params"]] for group in part.inner.param_groups
        ]
        # In memory: parameters 4, 3, 2, 1 and 0.
        assert sizes == [[13, 10], [7, 3]]
        assert [group["lr"] for group in part.inner.param_groups] == [0.1, 0.01]
        assert len(part.shards) == 5
        del ours

    on_ranks(1, program)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_loaded_state_joins_equal_shards_and_splits_others(num_steps: int) -> None:
    def program(rank: int) -> None:
        alone = Parts()
        whole = AdamW(alone.parameters(), **ADAMW)
        for number in range(num_steps):
            used = (0, 1, 2, 3, 4) if number == 0 else (0, 2, 3, 4)
            alone(0, number, used).backward()
            whole.step()
            whole.zero_grad()
        twins = Twins(rank, 1, optimizer_cls=AdamW, options=ADAMW)
        twins.backward(0)
        twins.step()
        twins.ours.load_state_dict(alone.state_dict())
        saved = copy.deepcopy(whole.state_dict())
        twins.sharded.load_state_dict(saved)
        # Parameters 1 and 0 are one bucket, and so are 4 and 3.
        assert len(_tensors(twins.sharded)) == (3 if num_steps == 1 else 4)
        twins.alone, twins.whole = alone, whole
        for number in range(2, 4):
            twins.backward(number)
            twins.step()
            twins.require_equal()

    on_ranks(1, program)


def test_a_part_without_any_parameter_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "_STEPPED_TOGETHER", 1)

    def program(rank: int) -> None:
        model, alone = Parts(), Parts()
        ours = ShardedDataParallel(model, ONE_EACH)
        sharded = ShardedOptimizer([model.parts[1].value], AdamW, lr=0.1)
        whole = AdamW([alone.parts[1].value], lr=0.1)
        assert [part.inner is None for part in sharded.parts] == [True, False, True, True, True]
        for number in range(3):
            ours(0, number).backward()
            alone(0, number).backward()
            sharded.step()
            whole.step()
            sharded.zero_grad()
            ours.zero_grad()
            alone.zero_grad()
            saved = sharded.state_dict()
            assert list(saved["state"]) == [0]
            sharded.load_state_dict(saved)
            assert len(sharded.state_tensors()) == 3 * bool(sharded.parts[1].shards)
        for own, other in zip(ours.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(own.detach(), other.detach())
        # Later groups find their parts.
        for model_, optimizer in ((ours.module, sharded), (alone, whole)):
            optimizer.add_param_group({"params": [model_.parts[3].value], "lr": 0.5})
        assert [part.inner is None for part in sharded.parts] == [True, False, True, False, True]
        ours(0, 3).backward()
        alone(0, 3).backward()
        sharded.step()
        whole.step()
        for own, other in zip(ours.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(own.detach(), other.detach())

    on_ranks(2, program)


def test_an_edit_between_steps_is_waited_for_and_kept() -> None:
    """A step with gradients set by hand while the last one is in flight."""
    with zero_ranks(2) as ranks:

        def program(rank: int) -> None:
            twins = Twins(rank, 2)
            for number in range(3):
                for model in (twins.ours.module, twins.alone):
                    with torch._C.DisableTorchFunctionSubclass():
                        for parameter in model.parameters():
                            parameter.grad = torch.full(parameter.shape, 1.0 + number)
                twins.step()
                sends = [e for e in ranks.events[rank] if e.startswith("send all-gather")]
                assert len(sends) == 3 * (number + 1)
            twins.require_equal()

        for seed in range(3):
            ranks.run(program, seed)
