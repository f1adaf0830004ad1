"""Parameters that are frozen or unfrozen, on some ranks only or on all."""

import warnings
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from paceline.parallel import (
    BucketedDataParallel,
    DataParallelContainer,
    FullyShardedDataParallel,
    RankPool,
    ShardedDataParallel,
    ShardedOptimizer,
)
from paceline.parallel.ranks.pending import CollectiveError
from paceline.parallel.same_model import DisagreementError
from tests.distributed.toys import Frozen, Layered, data, loss_of

Pools = Callable[[int], RankPool]

MAKE = {"ddp": BucketedDataParallel, "fsdp": FullyShardedDataParallel}


def _backward(container: DataParallelContainer, step: int, rank: int) -> None:
    loss_of(container(data(step, rank), rank)).backward()


def _unfreeze_on_one_rank(rank: int, world_size: int, kind: str, in_eval: bool) -> tuple[str, int]:
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=5))
    torch.manual_seed(0)
    container = MAKE[kind](Frozen(), process_group=group)
    _backward(container, 0, rank)
    container.train(not in_eval)
    if rank == 1:
        container.module.second.weight.requires_grad_(True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        expected = DisagreementError if rank == 1 else CollectiveError
        with pytest.raises(expected) as caught:
            _backward(container, 1, rank)
    del container
    dist.destroy_process_group(group)
    return str(caught.value), len(told)


@pytest.mark.host("NCCL ends a rank whose messages do not come")
@pytest.mark.parametrize(("kind", "in_eval"), [("ddp", False), ("ddp", True), ("fsdp", False)])
def test_a_change_on_one_rank_is_named_on_all(rank_pool: Pools, kind: str, in_eval: bool) -> None:
    (first, _), (second, num_warnings) = rank_pool(2).run(_unfreeze_on_one_rank, kind, in_eval)
    change = "parameter 'second.weight' was unfrozen"
    remedy = "freeze, unfreeze and replace the same parameters on all ranks, before the same pass"
    assert second == f"rank 1: {change} here, but nothing has changed on rank 0 for 5 s; {remedy}"
    assert num_warnings == 1  # It warned before it raised.
    assert first.startswith("rank 0: ")
    assert first.endswith(f"; on rank 1, {change}, and nothing has changed here: {remedy}")


def _change_differently(rank: int, _world_size: int, kind: str) -> str:
    torch.manual_seed(0)
    container = MAKE[kind](Layered())
    _backward(container, 0, rank)
    changed = container.module.third if rank else container.module.first
    changed.bias.requires_grad_(False)
    with pytest.raises(DisagreementError) as caught:
        _backward(container, 1, rank)
    return str(caught.value)


@pytest.mark.parametrize("kind", MAKE)
def test_changes_that_differ_are_named_at_once(rank_pool: Pools, kind: str) -> None:
    found = rank_pool(3).run(_change_differently, kind)
    assert found[0] == found[1] == found[2]
    assert "rank 0 has parameter 'first.bias' of shape (40,)" in found[0]
    assert "frozen, where rank 1 has parameter 'first.bias'" in found[0]


def _change_together(rank: int, _world_size: int, kind: str) -> list[float]:
    torch.manual_seed(0)
    containers = [MAKE[kind](Layered()) for _ in range(2)]  # Each synchronizes its own changes.
    for step in range(4):
        for number, container in enumerate(containers):
            container.module.second.weight.requires_grad_(step % 2 == number)
            _backward(container, step, rank)
    return [
        float(parameter.detach().sum())
        for container in containers
        for parameter in container.full_state_dict().values()
    ]


@pytest.mark.parametrize("kind", MAKE)
def test_changes_on_all_ranks_are_agreed_on(rank_pool: Pools, kind: str) -> None:
    first, *others = rank_pool(3).run(_change_together, kind)
    assert all(other == first for other in others)


def _freeze_on_one_rank(rank: int, _world_size: int) -> list[float]:
    torch.manual_seed(0)
    container = ShardedDataParallel(Layered())
    optimizer = ShardedOptimizer(container.parameters(), torch.optim.SGD, lr=0.1)
    container.module.second.weight.requires_grad_(rank != 1)
    for step in range(2):
        _backward(container, step, rank)
        optimizer.step()
        optimizer.zero_grad()
    return [float(values.sum()) for values in container.full_state_dict().values()]


def test_where_gradients_are_sharded_a_rank_may_freeze_what_others_train(rank_pool: Pools) -> None:
    first, *others = rank_pool(3).run(_freeze_on_one_rank)
    assert all(other == first for other in others)
