from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from paceline.core.errors import UsageError
from paceline.core.strategies import BUCKET_STRATEGIES, SHARDED_PARAMETERS, StrategyName
from paceline.parallel import RankPool
from paceline.parallel.strategies import apply_strategy, make_optimizer, message_sizes
from tests.distributed.toys import Layered, data, loss_of, oracle_backward

UNTOLD = SHARDED_PARAMETERS  # These gather and reduce layer by layer.

Pools = Callable[[int], RankPool]


def _full_parameters(model: nn.Module) -> list[Tensor]:
    return [
        parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        for parameter in model.parameters()
    ]


def _train(rank: int, world_size: int, name: StrategyName) -> int:
    torch.manual_seed(0)
    wrapped = apply_strategy(name, Layered(), 0.001 if name in BUCKET_STRATEGIES else None)
    torch.manual_seed(0)
    oracle = Layered()
    options = {"lr": 0.05, "momentum": 0.9, "foreach": False}
    ours = make_optimizer(name, wrapped, torch.optim.SGD, **options)
    whole = torch.optim.SGD(oracle.parameters(), **options)
    for step in range(4):
        loss_of(wrapped(data(step, 0 if name == "none" else rank), rank)).backward()
        oracle_backward(oracle, step, 1 if name == "none" else world_size)
        for optimizer in (ours, whole):
            optimizer.step()
            optimizer.zero_grad()
        for own, expected in zip(_full_parameters(wrapped), oracle.parameters(), strict=True):
            torch.testing.assert_close(own, expected.detach(), atol=1e-6, rtol=1e-6)
    sizes = message_sizes(wrapped)
    num_bytes = sum(parameter.nbytes for parameter in oracle.parameters())
    assert not sizes or num_bytes <= sum(sizes) <= 1.01 * num_bytes
    return len(sizes)


@pytest.mark.parametrize("name", get_args(StrategyName))
def test_every_strategy_trains_as_one_process_and_tells_its_messages(
    rank_pool: Pools, name: StrategyName
) -> None:
    num_messages = rank_pool(2).run(_train, name)[0]
    expected = {"none": 0, "naive": 5, "flat": 1, "overlapped": 5, **dict.fromkeys(UNTOLD, 0)}
    assert num_messages == expected.get(name, num_messages)
    assert name not in ("bucketed", "sharded") or num_messages > 1


def _refusals(_rank: int, _world_size: int) -> None:
    with pytest.raises(UsageError, match="'flat' has no buckets"):
        apply_strategy("flat", Layered(), 25.0)
    with pytest.raises(UsageError, match="torch_ddp cannot choose"):
        apply_strategy("torch_ddp", Layered(), "auto")
    assert isinstance(apply_strategy("torch_ddp", Layered()), DistributedDataParallel)


def test_bucket_sizes_that_do_not_apply_are_refused(rank_pool: Pools) -> None:
    rank_pool(2).run(_refusals)
