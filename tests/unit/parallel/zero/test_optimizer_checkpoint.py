"""A sharded optimizer's part of a checkpoint: what is in it, and what a load reads and refuses."""

import copy
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from paceline.parallel import ShardedDataParallel, ShardedOptimizer
from paceline.parallel.zero.optimizer_checkpoint import (
    FlatPiece,
    describe,
    load_entries,
    parameter_names,
    saved_keys,
)
from paceline.parallel.zero.optimizer_state import OptimizerStateError
from tests.unit.parallel.zero.optimizers import Estimating, Mixed
from tests.unit.parallel.zero.ranks import DECAYING, Parts, on_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore::paceline.parallel.OverlapWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("elementwise"),
]


CASES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {"lr": 0.1, "betas": (0.8, 0.9)}),
    "sgd": (SGD, DECAYING),
    "mixed": (Mixed, {}),
    "adafactor": (Adafactor, {"lr": 0.1}),
}


def _make(
    case: str, kind: str, dtype: torch.dtype = torch.float32, **keywords: Any
) -> tuple[nn.Module, ShardedOptimizer]:
    cls, options = CASES[case]
    model: nn.Module = Parts(dtype=dtype)
    if kind == "container":
        model = ShardedDataParallel(model, 64 / 2**20, **keywords)
    partition = "parameters" if kind == "parameters" else "elements"
    return model, ShardedOptimizer(model.parameters(), cls, partition=partition, **options)


def _step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    """Runs a step with the same data on all ranks, in which one parameter is not used."""
    optimizer.zero_grad()
    model(0, number, (0, 1, 2, 3)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _save(path: str, model: nn.Module, sharded: ShardedOptimizer) -> None:
    state = {"model": model.state_dict(), "optimizer": sharded.checkpoint_state(model)}
    dcp.save(state, checkpoint_id=path)


def _load(path: str, model: nn.Module, sharded: ShardedOptimizer) -> None:
    weights = {"model": model.state_dict()}
    dcp.load(weights, checkpoint_id=path)
    model.load_state_dict(weights["model"])
    sharded.load_checkpoint(model, dcp.FileSystemReader(path))


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(
    ("case", "kind", "then"),
    [
        ("adamw", "elements", "container"),
        ("adamw", "container", "parameters"),
        ("sgd", "container", "container"),
        ("mixed", "elements", "parameters"),
        ("mixed", "parameters", "elements"),
        ("adafactor", "parameters", "parameters"),
    ],
)
def test_saved_by_two_ranks_and_continued_by_others(
    tmp_path: pathlib.Path, case: str, kind: str, then: str, num_ranks: int
) -> None:
    path = str(tmp_path)
    cls, options = CASES[case]
    alone = Parts()
    whole = cls(alone.parameters(), **options)
    for number in range(4):
        if number == 2:
            whole.param_groups[0]["lr"] = 0.03
        _step(alone, whole, number)

    def save(_rank: int) -> None:
        model, sharded = _make(case, kind)
        for number in range(2):
            _step(model, sharded, number)
        sharded.param_groups[0]["lr"] = 0.03
        _save(path, model, sharded)

    def load(_rank: int) -> None:
        model, sharded = _make(case, then)
        _load(path, model, sharded)
        for name, value in whole.param_groups[0].items():
            if name != "params":
                loaded = sharded.param_groups[0][name]
                assert (type(loaded), loaded) == (type(value), value)
        for number in (2, 3):
            _step(model, sharded, number)
        for own, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(own.detach(), expected.detach(), rtol=1e-5, atol=1e-6)

    on_ranks(2, save)
    on_ranks(num_ranks, load)


def test_masters_are_saved_and_loaded(tmp_path: pathlib.Path) -> None:
    master = {"master_dtype": torch.float32}

    def train(model: nn.Module, sharded: ShardedOptimizer, *numbers: int) -> None:
        for number in numbers:
            _step(model, sharded, number)

    def save(_rank: int) -> list[Tensor]:
        model, sharded = _make("sgd", "container", torch.bfloat16, **master)
        train(model, sharded, 0, 1)
        _save(str(tmp_path), model, sharded)
        train(model, sharded, 2, 3)
        return [parameter.detach().clone() for parameter in model.parameters()]

    def load(_rank: int) -> list[Tensor]:
        model, sharded = _make("sgd", "container", torch.bfloat16, **master)
        _load(str(tmp_path), model, sharded)
        for shard in sharded.shards():
            rounded = shard.tensor.detach().bfloat16()
            whole = shard.parameter.detach().reshape(-1)[shard.start : shard.end]
            assert torch.equal(rounded, whole)
        assert any(
            not torch.equal(shard.tensor.detach().bfloat16().float(), shard.tensor.detach())
            for shard in sharded.shards()
        )
        train(model, sharded, 2, 3)
        return [parameter.detach().clone() for parameter in model.parameters()]

    expected = on_ranks(4, save)[0]
    for own, other in zip(on_ranks(1, load)[0], expected, strict=True):
        torch.testing.assert_close(own, other, rtol=0.01, atol=1e-4)


def test_what_a_rank_saves() -> None:
    def program(rank: int) -> list[str]:
        model, sharded = _make("mixed", "elements")
        _step(model, sharded, 0)
        state = sharded.checkpoint_state(model)
        for shard in sharded.shards():
            index = next(i for i, p in enumerate(model.parameters()) if p is shard.parameter)
            if index == 4:
                assert not any(key.startswith("state.parts.4.") for key in state)
                continue
            prefix = f"state.parts.{index}.value"
            piece = state[f"{prefix}.sum"]
            assert isinstance(piece, FlatPiece)
            assert (piece.start, piece.total) == (shard.start, shard.parameter.numel())
            assert state[f"{prefix}.calls"] == 1
            assert type(state[f"{prefix}.table"]) is Tensor
            assert type(state[f"{prefix}.step"]) is Tensor
        assert json.loads(state["layout"])["parts.1.value"] == [[2, 5], [5, 1]]
        assert json.loads(state["param_groups"]) == [
            {"lr": 0.1, "params": {"list": [0, 1, 2, 3, 4]}}
        ]
        return sorted(key for key in state if key.endswith(".sum"))

    first, second = on_ranks(2, program)
    assert set(first) | set(second) == {f"state.parts.{index}.value.sum" for index in range(4)}


def test_options_that_shards_disagree_on_are_not_saved() -> None:
    def program(_rank: int) -> None:
        parameters = [nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(32).double())]
        model = nn.ParameterList(parameters)
        sharded = ShardedOptimizer(parameters, Estimating, lr=0.1, partition="elements")
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        sharded.step()
        for call in (sharded.state_dict, sharded.full_state_dict):
            with pytest.raises(OptimizerStateError, match="keeps 'size' in its groups"):
                call()
        with pytest.raises(OptimizerStateError, match="this optimizer cannot be sharded"):
            sharded.checkpoint_state(model)

    on_ranks(1, program)


def test_a_piece_tells_where_it_is() -> None:
    values = torch.arange(6.0)
    piece = FlatPiece.of(values[2:5], 7, 20)
    assert piece.size() == torch.Size([20])
    (item,) = piece.__create_write_items__("name", piece)
    assert item.index.fqn == "name"
    assert item.index.offset == torch.Size([7])
    assert item.tensor_data is not None
    assert item.tensor_data.size == torch.Size([20])
    assert (item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes) == ((7,), (3,))
    assert item.tensor_data.properties.dtype == torch.float32
    shard = piece.__get_tensor_shard__(item.index)
    assert type(shard) is Tensor
    assert shard.data_ptr() == values[2:].data_ptr()


def test_the_keys_of_saved_parameters() -> None:
    saved: dict[str, Any] = dict.fromkeys(
        [
            "optimizer.param_groups",
            "optimizer.layout",
            "optimizer.state.a.b.step",
            "optimizer.state.a.b.sum",
            "optimizer.state.a.sum",
            "optimizer.state.unknown.sum",
            "other.state.a.sum",
            "a.sum",
            "a.b",
        ]
    )
    assert saved_keys(saved, "optimizer", ["a", "a.b", "new"]) == {
        "a": {"sum": "optimizer.state.a.sum"},
        "a.b": {"step": "optimizer.state.a.b.step", "sum": "optimizer.state.a.b.sum"},
        "new": {},
    }
    with pytest.raises(OptimizerStateError) as caught:
        saved_keys(saved, "second", ["a"])
    assert str(caught.value) == (
        "the checkpoint has no sharded optimizer under 'second'; its first entries are "
        "optimizer.param_groups, optimizer.layout, optimizer.state.a.b.step"
    )


@pytest.fixture
def texts_of_ranks(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, Any]]:
    """The texts that each rank reads, instead of a checkpoint's."""
    texts: dict[int, dict[str, Any]] = {}

    def read(wanted: dict[str, Any], **_: object) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        for key in wanted:
            wanted[key] = texts[rank][key.removeprefix("optimizer.")]

    monkeypatch.setattr("paceline.parallel.zero.optimizer_checkpoint.load", read)
    return texts


def _load_entries(
    groups: list[dict[str, Any]],
    names: dict[nn.Parameter, str],
    stages: dist.ProcessGroup | None = None,
) -> None:
    load_entries({}, groups, names, None, "optimizer", None, None, stages)  # type: ignore[arg-type]


def _plain() -> tuple[nn.Module, list[dict[str, Any]]]:
    model = nn.Linear(3, 2)
    return model, AdamW(model.parameters(), lr=0.1).param_groups


def _texts(groups: list[dict[str, Any]], model: nn.Module) -> dict[str, Any]:
    return describe(groups, parameter_names(groups, model))


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no text": (
        lambda texts: texts.update(layout=None),
        r"entry 'optimizer.layout' is damaged: .*; load an older checkpoint",
    ),
    "no JSON": (
        lambda texts: texts.update(param_groups="[{"),
        r"entry 'optimizer.param_groups' is damaged: Expecting",
    ),
    "too deep": (
        lambda texts: texts.update(param_groups="[" * 100_000),
        r"entry 'optimizer.param_groups' is damaged: ",
    ),
    "a list of layouts": (
        lambda texts: texts.update(layout="[]"),
        r"entry 'optimizer.layout' is damaged: it is no dict",
    ),
    "a table of groups": (
        lambda texts: texts.update(param_groups="{}"),
        r"entry 'optimizer.param_groups' is damaged: it is no list",
    ),
    "a group that is none": (
        lambda texts: texts.update(param_groups='[{"params": {"list": [0, 1]}}, 3]'),
        r"is damaged: a group is no table of options",
    ),
    "a group without parameters": (
        lambda texts: texts.update(param_groups='[{"lr": 1}]'),
        r"is damaged: a group has no list of parameters",
    ),
    "parameters that are no list": (
        lambda texts: texts.update(param_groups='[{"params": [0, 1]}]'),
        r"is damaged: a group has no list of parameters",
    ),
    "a parameter less": (
        lambda texts: texts.update(param_groups='[{"params": {"list": [0]}}]'),
        r"groups have \[2\] parameters, the saved ones \[1\]",
    ),
    "another name": (
        lambda texts: texts.update(layout=texts["layout"].replace("bias", "scale")),
        r"has no parameter 'bias', but weight, scale and others; give the model that was saved",
    ),
    "another shape": (
        lambda texts: texts.update(layout=texts["layout"].replace("[2, 3]", "[3, 2]")),
        r"'weight' was saved with shape and strides \[\[3, 2\], \[3, 1\]\], and has "
        r"\[\[2, 3\], \[3, 1\]\] now; load it into the same model",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_entries_that_do_not_fit_are_refused(
    texts_of_ranks: dict[int, dict[str, Any]], damage: str
) -> None:
    model, groups = _plain()
    texts = texts_of_ranks[0] = _texts(groups, model)
    change, message = DAMAGES[damage]
    change(texts)
    groups[0]["lr"] = 0.7
    with pytest.raises(OptimizerStateError, match=message):
        _load_entries(groups, parameter_names(groups, model))
    assert groups[0]["lr"] == 0.7


def test_options_keep_their_types(texts_of_ranks: dict[int, dict[str, Any]]) -> None:
    model, groups = _plain()
    given: dict[str, Any] = {
        "lr": torch.tensor(0.25),
        "betas": (0.8, 0.9),
        "trace": [1, 2],
        "nested": {"a": 1, "b": 2},
        "list_of_one": {"list": 3, "more": 4},
        "flag": True,
        "nothing": None,
    }
    groups[0].update(given)
    texts_of_ranks[0] = _texts(groups, model)
    for name in given:
        groups[0][name] = "lost"
    _load_entries(groups, parameter_names(groups, model))
    assert {name: groups[0][name] for name in given} == {**given, "lr": 0.25}
    assert type(groups[0]["betas"]) is tuple
    assert groups[0]["params"] == list(model.parameters())


def test_names_are_those_of_the_model_inside_a_container() -> None:
    def program(_rank: int) -> None:
        model = Parts()
        ours = ShardedDataParallel(model, None)
        groups = [{"params": list(model.parameters())[1:3]}]
        expected = dict(zip(groups[0]["params"], ("parts.1.value", "parts.2.value"), strict=True))
        assert parameter_names(groups, ours) == parameter_names(groups, model) == expected
        # An attribute of the name that is no module is the model's own affair.
        model.module = "inner"  # type: ignore[assignment]
        assert parameter_names(groups, model) == expected
        with pytest.raises(
            OptimizerStateError, match=r"^parameter 1 of the optimizer is not a par"
        ):
            parameter_names(
                [{"params": [groups[0]["params"][0], nn.Parameter(torch.ones(1))]}], ours
            )

    on_ranks(1, program)


def test_stages_of_a_pipeline_describe_the_optimizer_together(
    texts_of_ranks: dict[int, dict[str, Any]],
) -> None:
    """Each rank has some of the parameters, and one is on both."""

    def program(rank: int) -> dict[str, Any]:
        shared = nn.Parameter(torch.ones(2, 3))
        own = [nn.Parameter(torch.ones(2 + rank)) for _ in range(1 + rank)]
        names = {shared: "shared"} | {p: f"own.{rank}.{i}" for i, p in enumerate(own)}
        groups: list[dict[str, Any]] = [{"params": [shared], "lr": 1.0}, {"params": own, "lr": 2.0}]
        stages = dist.group.WORLD
        together = describe(groups, names, stages)
        alone = describe(groups, names)
        assert json.loads(together["layout"]) == {
            "shared": [[2, 3], [3, 1]],
            "own.0.0": [[2], [1]],
            "own.1.0": [[3], [1]],
            "own.1.1": [[3], [1]],
        }
        assert set(json.loads(alone["layout"])) == set(names.values())
        assert [g["params"]["list"] for g in json.loads(together["param_groups"])] == [
            [0],
            [0, 1, 2],
        ]
        assert [len(g["params"]["list"]) for g in json.loads(alone["param_groups"])] == [
            1,
            1 + rank,
        ]

        before = copy.copy(groups[1])
        groups[1]["lr"] = 5.0
        texts_of_ranks[rank] = together
        _load_entries(groups, names, stages)
        assert groups[1] == before
        texts_of_ranks[rank] = alone
        _load_entries(groups, names)
        with pytest.raises(OptimizerStateError, match=r"have \[1, 3\] .* the saved ones \[1, "):
            _load_entries(groups, names, stages)
        return together

    first, second = on_ranks(2, program)
    assert first == second


def test_stages_have_the_same_groups() -> None:
    def program(rank: int) -> None:
        parameters = [nn.Parameter(torch.ones(2)) for _ in range(1 + rank)]
        names = {parameter: f"{rank}.{index}" for index, parameter in enumerate(parameters)}
        groups = [{"params": [parameter]} for parameter in parameters]
        with pytest.raises(ValueError, match="zip"):
            describe(groups, names, dist.group.WORLD)

    on_ranks(2, program)


def test_what_cannot_be_loaded_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    def program(_rank: int) -> None:
        model, sharded = _make("adamw", "elements")
        _step(model, sharded, 0)
        _save(str(tmp_path), model, sharded)
        reader = dcp.FileSystemReader(str(tmp_path))
        with pytest.raises(OptimizerStateError, match="has no sharded optimizer under 'other'"):
            sharded.load_checkpoint(model, reader, prefix="other")
        with pytest.raises(OptimizerStateError, match=r"has no parameter '0.parts.0.value', but"):
            sharded.load_checkpoint(nn.Sequential(model), reader)
        with pytest.raises(OptimizerStateError, match="parameter 0 of the optimizer is not a par"):
            sharded.load_checkpoint(Parts(), reader)

    on_ranks(1, program)


def test_a_rank_reads_only_its_own_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is per element is read as a piece; what is not, and what is no tensor, as a whole."""

    def tensor(*size: int) -> TensorStorageMetadata:
        properties = TensorProperties(dtype=torch.float64)
        return TensorStorageMetadata(properties, torch.Size(size), [])

    def program(rank: int) -> None:
        model = nn.ParameterList([nn.Parameter(torch.ones(10))])
        sharded = ShardedOptimizer(model.parameters(), Mixed)
        (shard,) = sharded.shards()
        metadata = {
            "optimizer.param_groups": BytesStorageMetadata(),
            "optimizer.layout": BytesStorageMetadata(),
            "optimizer.state.0.step": tensor(10),
            "optimizer.state.0.sum": tensor(10),
            "optimizer.state.0.scale": tensor(),
            "optimizer.state.0.calls": BytesStorageMetadata(),
        }
        described = describe(sharded.param_groups, {shard.parameter: "0"})

        class Reader:
            def read_metadata(self) -> Any:
                return type("Metadata", (), {"state_dict_metadata": metadata})

        seen: dict[str, Any] = {}

        def read(wanted: dict[str, Any], **_: object) -> None:
            for key, room in wanted.items():
                short = key.removeprefix("optimizer.")
                seen[short] = room
                if short in described:
                    wanted[key] = described[short]
                elif isinstance(room, FlatPiece):
                    room._plain().fill_(4.0)
                elif isinstance(room, Tensor):
                    room.fill_(3.0)
                else:
                    wanted[key] = 2

        monkeypatch.setattr("paceline.parallel.zero.optimizer_checkpoint.load", read)
        sharded.load_checkpoint(model, Reader())  # type: ignore[arg-type]
        piece = seen["state.0.sum"]
        assert isinstance(piece, FlatPiece)
        assert (piece.start, piece.total) == (shard.start, 10)
        assert piece._plain().shape == (shard.end - shard.start,)
        assert piece.dtype == torch.float64
        # A step count is nobody's piece, even where it has the size of a parameter.
        assert type(seen["state.0.step"]) is Tensor
        assert seen["state.0.step"].shape == (10,)
        assert seen["state.0.scale"].shape == ()
        assert seen["state.0.calls"] is None
        (state,) = sharded.state.values()
        assert state["calls"] == 2
        assert float(state["scale"]) == 3.0
        assert state["sum"].tolist() == [4.0] * (shard.end - shard.start)
        assert type(state["sum"]) is Tensor

    on_ranks(2, program)
