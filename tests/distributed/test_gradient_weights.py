"""Weights of ranks in the gradient average: by tokens, zero, or all zero."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.accounting.buckets import GROUP_BYTES
from paceline.parallel import BucketedDataParallel, RankPool, ShardedDataParallel, ShardedOptimizer
from tests.distributed.toys import (
    CONTAINERS,
    Layered,
    data,
    loss_of,
    make_pair,
    require_equal,
    require_identical,
)

Pools = Callable[[int], RankPool]

_NOT_NUMBERS = (float("nan"), float("inf"))


def _padding_alone(rank: int, world_size: int, container: str, dtype: torch.dtype | None) -> None:
    """Gives the last rank a batch of padding only, whose mean loss is 0/0."""
    ours, oracle = make_pair(rank, "layered", container, reduction_dtype=dtype)
    is_void = rank == world_size - 1
    for step, bad in enumerate(_NOT_NUMBERS):
        ours.set_gradient_weight(0.0 if is_void else 2.0)
        (loss_of(ours(data(step, rank), rank)) * (bad if is_void else 1.0)).backward()
        losses = [loss_of(oracle(data(step, other), other)) for other in range(world_size - 1)]
        (sum(losses) / (world_size - 1)).backward()
        # Messages in bf16 have eight significant bits.
        require_equal(ours, oracle, tolerance=1e-6 if dtype is None else 1e-2)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("container", CONTAINERS)
def test_what_a_rank_of_weight_zero_computes_is_left_out_even_if_not_finite(
    rank_pool: Pools, container: str, dtype: torch.dtype | None
) -> None:
    rank_pool(3).run(_padding_alone, container, dtype)


def _sharded_padding_alone(rank: int, _world_size: int) -> None:
    torch.manual_seed(0)
    ours = ShardedDataParallel(Layered(), 0.001)
    torch.manual_seed(0)
    oracle = Layered()
    optimizers = [
        ShardedOptimizer(ours.parameters(), torch.optim.SGD, lr=0.1),
        torch.optim.SGD(oracle.parameters(), lr=0.1),
    ]
    ours.set_gradient_weight([1.0, 0.0][rank])
    (loss_of(ours(data(0, rank), rank)) * [1.0, float("nan")][rank]).backward()
    loss_of(oracle(data(0, 0), 0)).backward()
    for optimizer in optimizers:
        optimizer.step()
    for own, expected in zip(ours.parameters(), oracle.parameters(), strict=True):
        require_identical(own.detach(), "parameter")
        torch.testing.assert_close(own, expected, atol=1e-6, rtol=1e-6)


def test_shards_leave_out_what_a_rank_of_weight_zero_computes(rank_pool: Pools) -> None:
    rank_pool(2).run(_sharded_padding_alone)


def _all_zero(rank: int, world_size: int, container: str) -> None:
    ours, oracle = make_pair(rank, "layered", container)
    ours.set_gradient_weight(0.0)
    loss_of(ours(data(0, rank), rank)).backward()
    losses = [loss_of(oracle(data(0, other), other)) for other in range(world_size)]
    (sum(losses) / world_size).backward()
    require_equal(ours, oracle)


@pytest.mark.parametrize("container", CONTAINERS)
def test_where_all_weights_are_zero_all_ranks_count_alike(rank_pool: Pools, container: str) -> None:
    rank_pool(2).run(_all_zero, container)


class _LargeAndSmall(nn.Module):
    """Gradients that are copied one by one or together, within one bucket or over several."""

    def __init__(self) -> None:
        super().__init__()
        widths = (10, 600, 600, 3, 200, 10)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(widths))

    def forward(self, x: torch.Tensor, _rank: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def _sizes(rank: int, world_size: int, container: str, size_mb: float | None) -> None:
    torch.manual_seed(0)
    module, oracle = _LargeAndSmall(), _LargeAndSmall()
    oracle.load_state_dict(module.state_dict())
    make = CONTAINERS[container]
    ours = make(module) if size_mb is None else BucketedDataParallel(module, size_mb)
    for step in range(3):
        for model in (ours, oracle):
            # Alternates between kept views and fresh gradients.
            model.zero_grad(set_to_none=step % 2 == 0)
        ours.set_gradient_weight(rank + 1.0)
        loss_of(ours(data(step, rank), rank)).backward()
        losses = [(r + 1) * loss_of(oracle(data(step, r), r)) for r in range(world_size)]
        (sum(losses) / sum(range(1, world_size + 1))).backward()
        require_equal(ours, oracle)


@pytest.mark.parametrize(
    ("container", "size_mb"), [*((name, None) for name in CONTAINERS), ("ddp", 0.5), ("ddp", 1.5)]
)
def test_large_and_small_gradients_are_averaged_alike(
    rank_pool: Pools, container: str, size_mb: float | None
) -> None:
    rank_pool(2).run(_sizes, container, size_mb)


class _Complex(nn.Module):
    """A complex and a real parameter, whose gradients depend on the input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(3, 2, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.phase * x).real.sum() + (self.scale * x.real[0]).sum()


def _complex(rank: int, world_size: int, container: str, dtype: torch.dtype) -> None:
    ours = (
        ShardedDataParallel(_Complex(), reduction_dtype=dtype)
        if container == "zero2"
        else CONTAINERS[container](_Complex(), reduction_dtype=dtype)
    )
    given = [torch.full((3, 2), rank_ + 1 - 2j * rank_) for rank_ in range(world_size)]
    ours(given[rank]).backward()
    mean = sum(given) / world_size
    if container == "zero2":
        shards = ShardedOptimizer(ours.parameters(), torch.optim.SGD, lr=1.0)
        shards.step()
        ours.wait_for_parameters()
        torch.testing.assert_close(ours.module.phase.detach(), -mean.conj(), atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(ours.module.scale.detach(), -mean.real[0], atol=1e-2, rtol=1e-2)
    else:
        torch.testing.assert_close(ours.module.phase.grad, mean.conj(), atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(ours.module.scale.grad, mean.real[0], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("container", [*CONTAINERS, "zero2"])
def test_complex_gradients_are_averaged_in_another_dtype(
    rank_pool: Pools, container: str, dtype: torch.dtype
) -> None:
    rank_pool(2).run(_complex, container, dtype)


class _PartlyUsed(nn.Module):
    """A layer with a gradient of more than a MiB, and one that never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.unused, self.inner, self.outer = (
            nn.Linear(2, 2),
            nn.Linear(4, 600),
            nn.Linear(600, 600),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(inputs)).sum()


def _cleared_during_backward(rank: int, world_size: int) -> None:
    """On the first rank, user code clears a gradient after it was moved into its bucket."""
    model, oracle = _PartlyUsed(), _PartlyUsed()
    ours = BucketedDataParallel(model, 25.0)
    weight = model.outer.weight
    assert weight.nbytes > GROUP_BYTES  # A smaller gradient waits for others before it is moved.

    def clear(parameter: torch.Tensor) -> None:
        parameter.grad = None

    if rank == 0:
        weight.register_post_accumulate_grad_hook(clear)
    ours(torch.full((3, 4), rank + 1.0)).backward()
    assert weight.grad is not None
    require_identical(weight.grad, "gradient")
    for other in range(1, world_size):
        (oracle(torch.full((3, 4), other + 1.0)) / world_size).backward()
    torch.testing.assert_close(weight.grad, oracle.outer.weight.grad)


def test_a_gradient_that_user_code_clears_counts_as_none(rank_pool: Pools) -> None:
    rank_pool(2).run(_cleared_during_backward)
