"""What a gradient says and does whose elements are on other ranks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import UsageError
from paceline.parallel.zero.bucket import ReducedGradient
from tests.unit.parallel.zero.ranks import ONE_EACH, Twins, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::paceline.parallel.OverlapWarning")


def _make() -> ReducedGradient:
    return ReducedGradient(nn.Parameter(torch.ones(2, 3)), "blocks.0.weight")


USES: dict[str, Callable[[ReducedGradient], object]] = {
    "arithmetic": lambda gradient: gradient * 2,
    "in place": lambda gradient: gradient.mul_(2),
    "as the second operand": lambda gradient: torch.ones(2, 3) - gradient,
    "added to another": lambda gradient: torch.ones(2, 3) + gradient,
    "added to another in place": lambda gradient: torch.ones(2, 3).add_(gradient),
    "a sum": lambda gradient: gradient.sum(),
    "a norm": lambda gradient: torch.linalg.vector_norm(gradient),
    "copied from": lambda gradient: torch.ones(2, 3).copy_(gradient),
    "cloned": lambda gradient: gradient.clone(),
    "norms of a list": lambda gradient: torch._foreach_norm([gradient]),
    "after plain ones in a list": lambda gradient: torch._foreach_norm([torch.ones(2), gradient]),
    "stacked": lambda gradient: torch.stack([torch.ones(2, 3), gradient]),
    "scaled in a list": lambda gradient: torch._foreach_mul_([gradient], 2.0),
    "read": lambda gradient: float(gradient[0, 0]),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_is_refused_by_the_parameters_name(use: str) -> None:
    with pytest.raises(UsageError) as caught:
        USES[use](_make())
    assert str(caught.value) == (
        "the gradient of parameter 'blocks.0.weight' was reduce-scattered, and each rank has its "
        "own shard of it only: clip with the container's clip_grad_norm_(), update with a "
        "ShardedOptimizer of its parameters; for whatever needs whole gradients, such as a "
        "GradScaler, use BucketedDataParallel"
    )


def test_clearing_it_is_allowed() -> None:
    gradient = _make()
    assert gradient.zero_() is gradient
    assert type(gradient.detach()) is ReducedGradient
    assert gradient.detach_() is gradient
    torch._foreach_zero_([gradient])
    assert gradient.received is None


def test_it_has_the_look_of_a_gradient_and_no_memory() -> None:
    kernel = torch.zeros(2, 3, 4, 5, dtype=torch.bfloat16).contiguous(
        memory_format=torch.channels_last
    )
    gradient = ReducedGradient(kernel, "kernel")
    assert gradient.shape == kernel.shape
    assert gradient.stride() == kernel.stride()
    assert gradient.dtype == torch.bfloat16
    assert gradient.untyped_storage().nbytes() == 0
    assert repr(gradient) == "<gradient of 'kernel', reduce-scattered>"


def test_what_is_added_to_it_is_received() -> None:
    gradient = _make()
    first, second = torch.full((2, 3), 5.0), torch.full((2, 3), 3.0)
    assert gradient.add_(first) is gradient
    assert gradient.received is first
    gradient.add_(second)
    assert torch.equal(gradient.received, torch.full((2, 3), 8.0))
    assert torch.equal(first, torch.full((2, 3), 5.0))


def test_out_of_place_it_gives_way_to_what_is_added() -> None:
    more = torch.full((2, 3), 5.0)
    assert torch.equal(_make() + more, more)


def test_what_is_added_by_hand_is_sent_with_the_next_pass() -> None:
    def program(rank: int) -> None:
        twins = Twins(rank, 2, bucket_size_mb=ONE_EACH)
        twins.backward(0)
        for index in (0, 2):
            own = twins.ours.module.parts[index].value
            summands: list[Tensor] = [torch.full_like(own, value) for value in (0.5, 0.25)]
            for summand in summands:
                own.grad.add_(summand)
                twins.alone.parts[index].value.grad.add_(summand)
        # The next pass has a gradient of its own for one of the two.
        twins.backward(1, (0, 1), (0, 1))
        twins.step()
        twins.require_equal()

    on_ranks(2, program)
