"""Tests of how state of optimizers and generators gets into the format of a checkpoint."""

import pathlib
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from paceline.checkpoint import state as states
from paceline.checkpoint.catalog import open_checkpoint
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.restore import Source, load_step
from paceline.checkpoint.state import (
    capture_random_state,
    load_optimizer_state,
    load_training_state,
    optimizer_state,
    restore_random_state,
    training_state,
)
from paceline.checkpoint.storage import DirectoryStorage
from paceline.devices import accelerator
from paceline.parallel.zero.optimizer_checkpoint import FlatPiece
from tests.unit.checkpoint.ranks import checkpoint_ranks
from tests.unit.checkpoint.runs import SmallRun


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Has the name of torch's, whose import needs a process group."""


class Derived(ZeroRedundancyOptimizer):
    """A user's own version of it."""


@pytest.mark.parametrize("kind", [ZeroRedundancyOptimizer, Derived])
def test_torchs_own_sharded_optimizer_is_refused_by_saving_and_loading(
    tmp_path: pathlib.Path, kind: type[torch.optim.Optimizer]
) -> None:
    """Its state would silently be missing."""
    run = SmallRun()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, run.state(), None)
    optimizer = kind(run.model.parameters(), lr=0.1)  # type: ignore[call-arg]
    with pytest.raises(CheckpointError, match="use the strategy 'zero1'"):
        training_state(run.model, {"main": optimizer})
    with pytest.raises(CheckpointError, match="use the strategy 'zero1'"):
        load_step(
            tmp_path, 1, lambda source: load_training_state(source, run.model, {"main": optimizer})
        )


class Entry:
    """An optimizer with one entry of state per parameter."""

    def __init__(self, model: nn.Module, key: str, value: Any) -> None:
        parameters = list(model.parameters())
        self.param_groups = [{"params": parameters, "lr": 0.1}]
        self.state = {parameters[0]: {key: value}}


def _saved(parameter: torch.Tensor, key: str, value: Any) -> Any:
    model = nn.Module()
    model.weight = nn.Parameter(parameter)
    optimizer: Any = Entry(model, key, value)
    return optimizer_state(optimizer, model)[f"state.weight.{key}"]


def test_state_with_a_number_per_element_is_flat_and_other_state_is_as_it_is() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    flat = _saved(torch.zeros(2, 3), "average", matrix)
    assert isinstance(flat, FlatPiece)
    assert (flat.start, flat.total) == (0, 6)
    assert flat.as_subclass(torch.Tensor).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    rows = torch.ones(2, 1)
    assert _saved(torch.zeros(2, 3), "rows", rows) is rows
    step = torch.tensor(4.0)
    assert _saved(torch.zeros(()), "step", step) is step
    assert _saved(torch.zeros(2, 3), "mode", "fast") == "fast"


def _distributed(whole: torch.Tensor, placement: Placement, rank: int) -> DTensor:
    own = whole.chunk(2, placement.dim)[rank] if isinstance(placement, Shard) else whole
    return DTensor.from_local(
        own.clone().contiguous(),
        init_device_mesh("cpu", (2,)),
        [placement],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_ranks_save_whole_rows_of_a_matrix_however_it_is_split(
    monkeypatch: pytest.MonkeyPatch, placement: Placement
) -> None:
    whole = torch.arange(24.0).view(4, 6)
    moved: list[list[Placement]] = []

    def redistribute(tensor: DTensor, placements: list[Placement]) -> DTensor:
        moved.append(placements)
        return _distributed(whole, placements[0], tensor.device_mesh.get_local_rank())

    monkeypatch.setattr(DTensor, "redistribute", redistribute)
    with checkpoint_ranks(2) as ranks:

        def program(rank: int) -> tuple[int, int, list[float]]:
            value = _distributed(whole, placement, rank)
            saved = _saved(torch.zeros_like(value), "average", value)
            return saved.start, saved.total, saved.as_subclass(torch.Tensor).tolist()

        results = ranks.run(program)
    elements = whole.flatten().tolist()
    if isinstance(placement, Replicate):
        assert results == [(0, 24, elements)] * 2
    else:
        assert results == [(0, 24, elements[:12]), (12, 24, elements[12:])]
    # Only ranks that have columns exchange anything.
    assert moved == ([[Shard(0)]] * 2 if placement == Shard(1) else [])


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_ranks_load_the_part_that_they_have_without_exchanging_it(
    tmp_path: pathlib.Path, placement: Placement
) -> None:
    whole = torch.arange(24.0).view(4, 6)
    with checkpoint_ranks(2) as ranks:

        def made(rank: int, value: torch.Tensor) -> tuple[nn.Module, torch.optim.SGD]:
            model = nn.Module()
            model.weight = nn.Parameter(_distributed(torch.zeros(4, 6), placement, rank))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            optimizer.state[model.weight] = {"average": _distributed(value, placement, rank)}
            return model, optimizer

        def save(rank: int) -> None:
            model, optimizer = made(rank, whole)
            checkpointer = Checkpointer(tmp_path, asynchronous=False)
            state = {"optimizer": {"main": optimizer_state(optimizer, model)}}
            checkpointer.save(1, state, None)

        def load(rank: int) -> tuple[bool, list[str]]:
            model, optimizer = made(rank, torch.zeros(4, 6))
            source = Source(open_checkpoint(DirectoryStorage(tmp_path), 1))
            before = len(ranks.device.launches[rank])
            load_optimizer_state(optimizer, model, source, "optimizer.main")
            found = optimizer.state[model.weight]["average"].to_local()
            expected = _distributed(whole, placement, rank).to_local()
            return torch.equal(found, expected), ranks.device.launches[rank][before:]

        ranks.run(save)
        for is_equal, launches in ranks.run(load):
            assert is_equal
            assert not [launch for launch in launches if "float32" in launch]


def test_sharded_state_of_another_shape_is_refused_by_name() -> None:
    with checkpoint_ranks(2) as ranks:

        def program(rank: int) -> None:
            mesh = init_device_mesh("cpu", (2,))
            parameter, factor = (
                DTensor.from_local(torch.zeros(shape), mesh, [Shard(0)], run_check=False)
                for shape in ((2, 6), (2, 1))
            )
            with pytest.raises(
                CheckpointError, match=r"weight: the optimizer keeps 'rows' of shap"
            ):
                _saved(parameter, "rows", factor)

        ranks.run(program)


def test_the_state_of_an_accelerators_generator_is_restored_on_one_of_its_type_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    restored: list[tuple[torch.device, bytes]] = []
    contents = {"cuda": b"of cuda", "xpu": b"of xpu"}
    fake = types.SimpleNamespace(
        random_state=lambda device: contents.get(device.type),
        set_random_state=lambda device, state: restored.append((device, state)),
    )
    monkeypatch.setattr(states, "accelerator", fake)
    cpu, cuda, xpu = (torch.device(name) for name in ("cpu", "cuda", "xpu"))
    assert set(capture_random_state(cpu)) == {"torch", "python", "numpy"}
    state = capture_random_state(cuda)
    assert set(state) == {"torch", "python", "numpy", "cuda"}
    for device in (cpu, xpu):
        restore_random_state(state, device)
    assert restored == []
    restore_random_state(state, cuda)
    assert restored == [(cuda, b"of cuda")]
    assert accelerator.random_state(cpu) is None
