from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.core.errors import UsageError
from paceline.core.strategies import BUCKET_STRATEGIES, StrategyName
from paceline.parallel import RankPool
from paceline.parallel.strategies import apply_strategy, message_sizes
from tests.distributed.toys import Layered, data, loss_of, oracle_backward, require_equal

Pools = Callable[[int], RankPool]


def _wrap_and_step(rank: int, world_size: int, name: StrategyName) -> int:
    torch.manual_seed(0)
    wrapped = apply_strategy(name, Layered(), 0.001 if name in BUCKET_STRATEGIES else None)
    torch.manual_seed(0)
    oracle = Layered()
    for step in range(3):
        wrapped.zero_grad()
        oracle.zero_grad()
        loss_of(wrapped(data(step, rank), rank)).backward()
        oracle_backward(oracle, step, world_size)
        if name != "none":
            require_equal(wrapped, oracle)
    sizes = message_sizes(wrapped)
    num_bytes = sum(parameter.nbytes for parameter in wrapped.parameters())
    assert name == "none" or num_bytes <= sum(sizes) <= 1.01 * num_bytes
    return len(sizes)


@pytest.mark.parametrize("name", get_args(StrategyName))
def test_every_strategy_averages_and_tells_its_messages(
    rank_pool: Pools, name: StrategyName
) -> None:
    num_messages = rank_pool(2).run(_wrap_and_step, name)[0]
    expected = {"none": 0, "naive": 5, "flat": 1, "overlapped": 5}
    assert num_messages == expected.get(name, num_messages)
    assert name != "bucketed" or num_messages > 1


def _refusals(_rank: int, _world_size: int) -> None:
    with pytest.raises(UsageError, match="'flat' has no buckets"):
        apply_strategy("flat", Layered(), 25.0)
    with pytest.raises(UsageError, match="torch_ddp cannot choose"):
        apply_strategy("torch_ddp", Layered(), "auto")
    assert isinstance(apply_strategy("torch_ddp", Layered()), DistributedDataParallel)


def test_bucket_sizes_that_do_not_apply_are_refused(rank_pool: Pools) -> None:
    rank_pool(2).run(_refusals)
