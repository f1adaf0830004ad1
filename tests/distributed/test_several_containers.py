"""Two containers in one backward pass: no rank waits for a message that another sends later."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.parallel import RankPool, ShardedDataParallel
from tests.distributed.toys import CONTAINERS, WIDTH, Unused, data, loss_of, require_identical

Pools = Callable[[int], RankPool]

_WRAPPERS: dict[str, Callable[..., nn.Module]] = {
    **CONTAINERS,
    "reduced": lambda module, **kw: CONTAINERS["ddp"](module, reduction_dtype=torch.bfloat16, **kw),
    "zero2": lambda module, **kw: ShardedDataParallel(module, 0.0016, **kw),
}


def _towers(rank: int, _world_size: int, container: str, own_groups: bool) -> None:
    """Runs two towers with unused parameters; with separate groups, their order differs by rank."""
    groups: list[Any] = [None, None]
    if own_groups:
        groups = [dist.new_group([0, 1], timeout=timedelta(seconds=20)) for _ in range(2)]
    torch.manual_seed(0)
    towers = [_WRAPPERS[container](Unused(), process_group=group) for group in groups]
    oracles = [Unused() for _ in towers]
    for oracle, tower in zip(oracles, towers, strict=True):
        oracle.load_state_dict(tower.state_dict())
    order = (0, 1) if rank == 0 or not own_groups else (1, 0)
    outputs = [towers[number](data(0, rank), rank) for number in order]
    sum(loss_of(output) for output in outputs).backward()
    for tower, oracle in zip(towers, oracles, strict=True):
        (sum(loss_of(oracle(data(0, other), other)) for other in range(2)) / 2).backward()
        if container == "zero2":
            expected = nn.utils.get_total_norm(
                [p.grad for p in oracle.parameters() if p.grad is not None]
            )
            torch.testing.assert_close(tower.clip_grad_norm_(1e9), expected, rtol=1e-5, atol=0)
            continue
        for own, reference in zip(tower.parameters(), oracle.parameters(), strict=True):
            assert (own.grad is None) == (reference.grad is None)
            if own.grad is not None:
                require_identical(own.grad, "gradient")
                tolerance = 1e-2 if container == "reduced" else 1e-6
                torch.testing.assert_close(own.grad, reference.grad, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("container", _WRAPPERS)
def test_ranks_may_reach_containers_with_groups_of_their_own_in_any_order(
    rank_pool: Pools, container: str
) -> None:
    rank_pool(2).run(_towers, container, True)


@pytest.mark.parametrize("container", ["ddp", "zero2"])
def test_containers_that_share_a_group_are_averaged_in_one_pass(
    rank_pool: Pools, container: str
) -> None:
    rank_pool(2).run(_towers, container, False)


def _penalty(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return (gradient.norm(dim=-1) - 1).square().mean() + y.mean()


def _gradient_penalty(rank: int, world_size: int, container: str) -> None:
    torch.manual_seed(0)
    oracle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    torch.manual_seed(0)
    ours = _WRAPPERS[container](
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    )
    inputs = [data(0, other).requires_grad_() for other in range(world_size)]
    _penalty(inputs[rank], ours(inputs[rank])).backward()
    (sum(_penalty(x, oracle(x)) for x in inputs) / world_size).backward()
    for own, reference in zip(ours.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(own.grad, reference.grad, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_penalty_on_the_gradient_of_the_input_is_averaged(
    rank_pool: Pools, container: str
) -> None:
    rank_pool(2).run(_gradient_penalty, container)
