"""The full state in torch's format: gathered from any ranks, loaded by any others."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from paceline.parallel import ShardedDataParallel, ShardedOptimizer
from paceline.parallel.zero.optimizer_state import (
    OptimizerStateError,
    gather_full_state,
    install,
    load_options,
    pack_groups,
    values_differ,
)
from tests.unit.parallel.zero.optimizers import Mixed
from tests.unit.parallel.zero.ranks import DECAYING, Parts, on_ranks, zero_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore::paceline.parallel.OverlapWarning"),
    pytest.mark.usefixtures("elementwise"),
]


CASES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {"lr": 0.1, "amsgrad": True}),
    "sgd": (SGD, DECAYING),
    "mixed": (Mixed, {}),
    "adafactor": (Adafactor, {"lr": 0.1}),
}
KINDS = ["elements", "parameters", "container"]


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, in another order than the model's."""
    parameters = list(model.parameters())
    return [
        {"params": [parameters[3], parameters[1]]},
        {"params": [parameters[0], *parameters[4:]], "lr": 0.05},
    ]


def _make(case: str, kind: str) -> tuple[nn.Module, ShardedOptimizer]:
    cls, options = CASES[case]
    model: nn.Module = Parts()
    if kind == "container":
        model = ShardedDataParallel(model, 64 / 2**20)
    partition = "parameters" if kind == "parameters" else "elements"
    return model, ShardedOptimizer(_groups(model), cls, partition=partition, **options)


def _make_alone(case: str) -> tuple[nn.Module, Optimizer]:
    cls, options = CASES[case]
    model = Parts()
    return model, cls(_groups(model), **options)


def _step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    """Runs a step with the same data on all ranks, in which one parameter is not used."""
    optimizer.zero_grad()
    model(0, number, (0, 1, 2, 3)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _require_same(actual: Any, expected: Any) -> None:
    """Requires equal values, of equal types and shapes."""
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key, value in expected.items():
            _require_same(actual[key], value)
    elif isinstance(expected, Tensor):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual, expected)
    else:
        assert type(actual) is type(expected)
        assert actual == expected


PAIRS = [
    (case, kind) for case in CASES for kind in KINDS if case != "adafactor" or kind == "parameters"
]


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(("case", "kind"), PAIRS)
def test_the_full_state_is_that_of_torchs_optimizer(case: str, kind: str, num_ranks: int) -> None:
    def program(rank: int) -> None:
        model, sharded = _make(case, kind)
        alone, whole = _make_alone(case)
        for number in range(2):
            _step(model, sharded, number)
            _step(alone, whole, number)
        sharded.param_groups[1]["lr"] = whole.param_groups[1]["lr"] = 0.03
        expected = whole.state_dict()
        full = sharded.full_state_dict()
        if rank == 0:
            _require_same(full, expected)
            assert all(
                value.device.type == "cpu"
                for state in full["state"].values()
                for value in state.values()
                if isinstance(value, Tensor)
            )
        else:
            assert full == {}
        on_all = sharded.state_dict()
        _require_same(on_all, expected)
        # What was returned is nobody's state: a later step leaves it as it is.
        kept = copy.deepcopy(on_all)
        _step(model, sharded, 2)
        _require_same(on_all, kept)
        if kind == "container":
            model.wait_for_parameters()

    on_ranks(num_ranks, program)


@pytest.mark.parametrize("source", ["elements", "parameters", "container", "torch"])
@pytest.mark.parametrize(("case", "kind"), PAIRS)
def test_a_full_state_is_continued_by_other_ranks(case: str, kind: str, source: str) -> None:
    if case == "adafactor" and source not in ("parameters", "torch"):
        source = "parameters"
    alone, whole = _make_alone(case)
    for number in range(2):
        _step(alone, whole, number)
    whole.param_groups[1]["lr"] = 0.03

    def save(_rank: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        model, sharded = _make(case, source)
        for number in range(2):
            _step(model, sharded, number)
        sharded.param_groups[1]["lr"] = 0.03
        return sharded.full_state_dict(), copy.deepcopy(model.state_dict())

    saved, weights = (
        (copy.deepcopy(whole.state_dict()), copy.deepcopy(alone.state_dict()))
        if source == "torch"
        else on_ranks(3, save)[0]
    )
    before = copy.deepcopy(saved)

    def load(_rank: int) -> None:
        model, sharded = _make(case, kind)
        if kind == "container":
            model(0, 9).backward()  # A step may come before the load.
            sharded.step()
            sharded.zero_grad()
        model.load_state_dict(weights)
        sharded.load_state_dict(saved)
        assert sharded.param_groups[1]["lr"] == 0.03
        assert all(isinstance(p, nn.Parameter) for g in sharded.param_groups for p in g["params"])
        for number in (2, 3):
            _step(model, sharded, number)
        for own, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(own.detach(), expected.detach(), rtol=1e-5, atol=1e-6)

    for number in (2, 3):
        _step(alone, whole, number)
    on_ranks(2, load)
    _require_same(saved, before)  # The optimizers change copies.


def test_a_state_by_names_is_matched_by_order() -> None:
    """torch.distributed.checkpoint puts names where torch's optimizers have numbers."""

    def program(_rank: int) -> None:
        _, sharded = _make("adamw", "elements")
        alone, whole = _make_alone("adamw")
        _step(alone, whole, 0)
        saved = whole.state_dict()
        named = {
            "state": {f"name {number}": state for number, state in saved["state"].items()},
            "param_groups": [
                {
                    **group,
                    "params": [f"name {number}" for number in group["params"]],
                    "param_names": ["x"] * len(group["params"]),
                }
                for group in saved["param_groups"]
            ],
        }
        sharded.load_state_dict(named)
        assert "param_names" not in sharded.param_groups[0]
        _require_same(sharded.state_dict(), saved)

    on_ranks(2, program)


def test_a_state_without_some_parameters_is_loaded() -> None:
    def program(_rank: int) -> None:
        model, sharded = _make("adamw", "container")
        _step(model, sharded, 0)
        empty = {**sharded.state_dict(), "state": {}}
        sharded.load_state_dict(empty)
        assert sharded.state_dict()["state"] == {}
        model.wait_for_parameters()

    on_ranks(2, program)


def test_groups_that_do_not_fit_are_refused() -> None:
    def program(_rank: int) -> None:
        _, sharded = _make("adamw", "elements")
        other = AdamW([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(3)])
        with pytest.raises(OptimizerStateError) as caught:
            sharded.load_state_dict(other.state_dict())
        assert str(caught.value) == (
            "the optimizer's groups have [2, 2] parameters, the saved ones [1, 1, 1]; create the "
            "optimizer with the groups that it was saved with"
        )

    on_ranks(1, program)


def test_options_are_loaded_without_parameters() -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    groups: list[dict[str, Any]] = [
        {"params": list(parameters), "param_names": ["a", "b"], "lr": 1}
    ]
    load_options(groups, [{"params": [0, 1], "param_names": ["c", "d"], "lr": 2, "more": 3}])
    assert groups == [{"params": parameters, "param_names": ["a", "b"], "lr": 2, "more": 3}]
    # A rank that has only some of the parameters is told how many there are.
    load_options(groups, [{"params": [0, 1, 2], "lr": 4}], [3])
    assert groups[0]["lr"] == 4
    with pytest.raises(OptimizerStateError, match=r"have \[5\] parameters, the saved ones \[2\]"):
        load_options(groups, [{"params": [0, 1]}], [5])
    assert pack_groups(groups)[0]["params"] == [0, 1]


def test_each_bucket_is_gathered_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no rank holds more than the result and one bucket."""
    calls: list[tuple[str, int]] = []

    def noted(name: str) -> Callable[..., None]:
        gather = getattr(dist, name)

        def call(*arguments: Any, **keywords: Any) -> None:
            calls.append((name, dist.get_rank()))
            gather(*arguments, **keywords)

        return call

    with zero_ranks(2) as ranks:
        made = ranks.run(lambda _rank: _make("adamw", "container"))
        num_parts = len(made[0][1].parts)
        monkeypatch.setattr(dist, "gather_object", noted("gather_object"))
        ranks.run(lambda rank: made[rank][1].full_state_dict())
        assert sorted(calls) == [
            ("gather_object", rank) for rank in range(2) for _ in range(num_parts)
        ]


@pytest.mark.parametrize("on_all_ranks", [True, False])
def test_the_state_on_all_ranks_is_on_the_parameters_device(
    monkeypatch: pytest.MonkeyPatch, on_all_ranks: bool
) -> None:
    """Except for step counts, which torch's optimizers keep on the CPU; elsewhere all is there."""
    parameter = nn.Parameter(torch.empty(2, 3, device="meta"))
    entries = [
        (0, "sum", 0, torch.arange(4.0)),
        (0, "sum", 4, torch.arange(4.0, 6.0)),
        (0, "table", None, torch.ones(5)),
        (0, "step", None, torch.tensor(3.0)),
        (0, "calls", None, 4),
    ]

    def gather(gathered: list[Any], _own: object, **_: object) -> None:
        gathered[:] = [entries[:1], entries[1:]]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "gather_object", lambda own, to, **_: gather(to, own))
    part: Any = SimpleNamespace(
        group=SimpleNamespace(get=lambda: SimpleNamespace(size=lambda: 2, rank=lambda: 0)),
        shards=[],
        flats=[SimpleNamespace(parameters=[parameter])],
        changed_options=lambda: iter(()),
    )
    full = gather_full_state([{"params": [parameter]}], [part], on_all_ranks=on_all_ranks)
    state = full["state"][0]
    kind = "meta" if on_all_ranks else "cpu"
    assert (state["sum"].device.type, state["sum"].shape) == (kind, (2, 3))
    assert state["table"].device.type == kind
    assert state["step"].device.type == "cpu"
    assert state["calls"] == 4
    if not on_all_ranks:
        assert state["sum"].flatten().tolist() == [0, 1, 2, 3, 4, 5]


MASTER: dict[str, Any] = {"master_dtype": torch.float32}


def _make_bf16(**keywords: Any) -> tuple[ShardedDataParallel, ShardedOptimizer]:
    model = ShardedDataParallel(Parts(dtype=torch.bfloat16), 64 / 2**20, **keywords)
    return model, ShardedOptimizer(model.parameters(), SGD, **DECAYING)


def test_master_copies_are_no_part_of_the_full_state() -> None:
    def program(rank: int) -> None:
        model, sharded = _make_bf16(**MASTER)
        _step(model, sharded, 0)
        full = sharded.full_state_dict()
        if rank == 0:
            for state in full["state"].values():
                assert list(state) == ["momentum_buffer"]
        assert any(tensor.dtype == torch.float32 for tensor in sharded.state_tensors())
        model.wait_for_parameters()

    on_ranks(2, program)


def test_a_loaded_state_brings_the_master_up_to_date() -> None:
    """Weights that were written past torch's counts of changes are the new master's."""

    def program(_rank: int) -> None:
        model, sharded = _make_bf16(**MASTER)
        _step(model, sharded, 0)
        state = sharded.state_dict()
        for parameter in model.parameters():
            parameter.data.fill_(5.0)
        sharded.load_state_dict(state)
        for shard in sharded.shards():
            assert bool((shard.tensor == 5).all())

    on_ranks(2, program)


def test_only_a_parameter_with_a_master_gets_a_saved_master() -> None:
    def program(_rank: int) -> None:
        for keywords, expected in ((MASTER, 2.0), ({}, None)):
            model, sharded = _make_bf16(**keywords)
            before = {shard: shard.tensor.detach().clone() for shard in sharded.shards()}
            states = {
                shard: {
                    "momentum_buffer": torch.ones_like(shard.tensor),
                    "master": torch.full_like(shard.tensor, 2.0),
                }
                for shard in sharded.shards()
            }
            install(sharded.parts, states)
            for shard in sharded.shards():
                value = shard.tensor.detach()
                if expected is None:
                    assert torch.equal(value, before[shard])
                else:
                    assert bool((value == expected).all())
            for state in sharded.state.values():
                assert list(state) == ["momentum_buffer"]
            # What was given is not changed.
            assert all("master" in state for state in states.values())
            del model

    on_ranks(2, program)


def test_when_values_differ() -> None:
    one, same, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])
    assert not values_differ(one, same)
    assert values_differ(one, other)
    assert not values_differ(1, 1)
    assert values_differ(1, 2)
    assert values_differ((0.9, 0.99), (0.9, 0.999))
    assert values_differ(torch.tensor(1.0), 2.0)
    assert not values_differ(torch.tensor(1.0), 1.0)
    assert not values_differ(1.0, torch.tensor(1.0))
