"""Masters: what they keep, when they follow the parameters, and that they cost no comparison."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from paceline.parallel import ShardedDataParallel, ShardedOptimizer
from paceline.parallel.zero.flat_parameters import FlatParameters
from tests.unit.parallel.zero.ranks import DECAYING, Parts, Twins, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::paceline.parallel.OverlapWarning")


MASTER: dict[str, Any] = {"master_dtype": torch.float32}


def _bf16() -> nn.Module:
    return Parts(dtype=torch.bfloat16)


def test_a_master_keeps_what_rounding_would_lose() -> None:
    def program(rank: int) -> None:
        ours = ShardedDataParallel(_bf16(), 64 / 2**20, **MASTER)
        sharded = ShardedOptimizer(ours.parameters(), SGD, lr=2.0**-12)
        masters = {
            index: [parameter.detach().float().clone()]
            for index, parameter in enumerate(ours.parameters())
        }
        for _ in range(20):
            for index, parameter in enumerate(ours.parameters()):
                parameter.grad = torch.full_like(parameter, 1.0 + index)
            sharded.step()
            sharded.zero_grad()
            ours.wait_for_parameters()
        for index, parameter in enumerate(ours.parameters()):
            expected = masters[index][0] - 20 * 2.0**-12 * (1.0 + index)
            torch.testing.assert_close(parameter.detach(), expected.bfloat16(), rtol=0, atol=0)
        for shard in sharded.shards():
            assert shard.tensor.dtype == torch.float32
        kept = sharded.state_tensors()
        assert sum(t.numel() for t in kept) == sum(f.master.numel() for f in ours._shared.flats)

    on_ranks(2, program)


def _fill(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(5.0)


EDITS: dict[str, Callable[[nn.Module], object]] = {
    "load_state_dict": lambda model: model.load_state_dict(
        {name: torch.full_like(p, 5.0) for name, p in model.named_parameters()}
    ),
    "load_state_dict of layers": lambda model: [
        part.load_state_dict({"value": torch.full_like(part.value, 5.0)}) for part in model.parts
    ],
    "in place": _fill,
}


@pytest.mark.parametrize("when", ["before the first pass", "before the step", "after the step"])
@pytest.mark.parametrize("edit", EDITS)
def test_edits_reach_the_master(edit: str, when: str) -> None:
    def program(rank: int) -> None:
        ours = ShardedDataParallel(_bf16(), 64 / 2**20, **MASTER)
        sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.0)
        if when == "before the first pass":
            EDITS[edit](ours.module)
        for number in range(3):
            ours(rank, number).backward()
            if (number, when) == (1, "before the step"):
                EDITS[edit](ours.module)
            sharded.step()
            sharded.zero_grad()
            if (number, when) == (1, "after the step"):
                EDITS[edit](ours.module)
        for parameter in ours.parameters():
            assert bool((parameter == 5.0).all())
        assert all(bool((shard.tensor == 5.0).all()) for shard in sharded.shards())

    on_ranks(2, program)


def test_loading_reaches_the_master_at_once_and_spares_what_is_equal() -> None:
    def program(rank: int) -> None:
        ours = ShardedDataParallel(_bf16(), None, **MASTER)
        (flat,) = ours._shared.flats
        precise = flat.master + 2.0**-12 * flat.master
        flat.master.copy_(precise)
        changed = ours.module.parts[1].value
        state = {name: p.detach().clone() for name, p in ours.named_parameters()}
        state["parts.1.value"].add_(1.0)
        ours.module.load_state_dict(state)
        begin = flat.layout.borders[rank]
        for shard_slice in flat.layout.slices(rank):
            own = slice(
                shard_slice.offset - begin,
                shard_slice.offset - begin + shard_slice.end - shard_slice.start,
            )
            if shard_slice.tensor == 1:
                new = changed.detach().float().view(-1)[shard_slice.start : shard_slice.end]
                assert torch.equal(flat.master[own], new)
            else:
                assert torch.equal(flat.master[own], precise[own])

    on_ranks(2, program)


def test_masters_are_compared_only_after_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison reads all of a rank's parameters."""
    compared: list[int] = []
    refresh = FlatParameters.refresh_master

    def noted(flat: FlatParameters) -> None:
        compared.append(dist.get_rank())
        refresh(flat)

    monkeypatch.setattr(FlatParameters, "refresh_master", noted)

    def program(rank: int) -> None:
        ours = ShardedDataParallel(_bf16(), None, **MASTER)
        sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.1)

        def num_compared(number: int) -> int:
            before = compared.count(rank)
            ours(rank, number).backward()
            sharded.step()
            sharded.zero_grad()
            return compared.count(rank) - before

        assert [num_compared(number) for number in range(3)] == [0, 0, 0]
        _fill(ours)
        assert [num_compared(number) for number in range(2)] == [1, 0]
        ours.load_state_dict(ours.state_dict())  # Compares by itself.
        assert [num_compared(number) for number in range(2)] == [0, 0]
        ours.wait_for_parameters()

    on_ranks(2, program)


def test_a_master_of_the_parameters_own_dtype_is_none() -> None:

    def program(rank: int) -> None:
        twins = Twins(rank, 2, options=DECAYING, master_dtype=torch.float32)
        assert not any(flat.has_master for flat in twins.flats)
        twins.backward(0)
        twins.step()
        twins.require_equal()

    on_ranks(2, program)
