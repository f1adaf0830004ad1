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
from paceline.parallel.strategies import (
    apply_strategy,
    make_optimizer,
    message_sizes,
    record_statistics,
    synchronization_stats,
)
from paceline.parallel.traffic import SynchronizationStats
from tests import devices
from tests.distributed.toys import WIDTH, Layered, data, loss_of, oracle_backward

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
    # Each parameter's rows per rank, and the flags, are padded.
    most = 1.05 if name in SHARDED_PARAMETERS else 1.01
    assert not sizes or num_bytes <= sum(sizes) <= most * num_bytes
    return len(sizes)


@pytest.mark.parametrize("name", get_args(StrategyName))
def test_every_strategy_trains_as_one_process_and_tells_its_messages(
    rank_pool: Pools, name: StrategyName
) -> None:
    num_messages = rank_pool(2).run(_train, name)[0]
    expected = {"none": 0, "naive": 5, "flat": 1, "overlapped": 5}
    # One message per layer; FSDP2 sends one for a model without a module list.
    expected |= {"fsdp": 3, "torch_fsdp2": 1}
    assert num_messages == expected.get(name, num_messages)
    assert name not in ("ddp", "zero2") or num_messages > 1


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * self.gain


def _fsdp2_tells(rank: int, _world_size: int) -> None:
    model = apply_strategy("torch_fsdp2", _Blocks())
    assert message_sizes(model) == []
    model(data(0, rank)).sum().backward()
    assert synchronization_stats(model) is None  # Recording is off.
    block, rest = 4 * (WIDTH * WIDTH + WIDTH), 4 * WIDTH
    sizes = [block, block, rest, block]
    assert message_sizes(model) == sizes
    record_statistics(model)
    model(data(1, rank)).sum().backward()
    stats = synchronization_stats(model)
    assert stats is not None
    assert [bucket.num_bytes for bucket in stats.buckets] == sizes
    assert [bucket.num_parameters for bucket in stats.buckets] == [2, 2, 1, 2]
    if devices.is_accelerator():
        assert stats.exposed_wait_s is None  # Its streams wait, in places that torch does not show.
    else:
        _require_sequence(stats)
    with torch.no_grad():
        model(data(2, rank))
    assert synchronization_stats(model) == stats
    record_statistics(model, False)
    model(data(3, rank)).sum().backward()
    assert synchronization_stats(model) is None


def _require_sequence(stats: SynchronizationStats) -> None:
    moments = [moment for one in stats.buckets for moment in (one.launch_s, one.finish_s)]
    assert moments[0] > 0
    assert moments == sorted(moments)  # Sequential: each call returns when its message has arrived.
    # The input's gradient marks the end of a module's backward; the first block's input has none.
    assert stats.buckets[1].finish_s <= stats.backward_s <= stats.buckets[2].launch_s
    gradients_s = sum(bucket.finish_s - bucket.launch_s for bucket in stats.buckets)
    assert stats.exposed_wait_s is not None
    assert stats.exposed_wait_s > gradients_s  # It includes waits for parameters.


def test_torchs_fully_sharded_strategy_tells_messages_and_waits(rank_pool: Pools) -> None:
    rank_pool(2).run(_fsdp2_tells)


def _refusals(_rank: int, _world_size: int) -> None:
    with pytest.raises(UsageError, match="'flat' has no buckets"):
        apply_strategy("flat", Layered(), 25.0)
    with pytest.raises(UsageError, match="torch_ddp cannot choose"):
        apply_strategy("torch_ddp", Layered(), "auto")
    assert isinstance(apply_strategy("torch_ddp", Layered()), DistributedDataParallel)


def test_bucket_sizes_that_do_not_apply_are_refused(rank_pool: Pools) -> None:
    rank_pool(2).run(_refusals)
