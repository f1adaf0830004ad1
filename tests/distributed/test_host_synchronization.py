"""The host does not wait for the device between the first forward pass and the optimizer's step.

On a GPU, reading a value blocks the host until all queued work has run. The same calls can be
detected on a CPU, and these tests refuse them.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.parallel import BucketedDataParallel, RankPool, ShardedDataParallel, ShardedOptimizer
from paceline.parallel.buckets import Bucket
from paceline.parallel.zero.bucket import ShardedBucket
from tests.distributed.toys import CONTAINERS, Layered, data, loss_of

Pools = Callable[[int], RankPool]

_READS = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::equal"}


class _NoReads(TorchDispatchMode):
    """Refuses operators that would make the host wait for a device."""

    def __torch_dispatch__(
        self, function: Any, _types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        name = function._schema.name
        assert name not in _READS, f"{name} waits for the device"
        return function(*arguments, **(keywords or {}))


@contextlib.contextmanager
def _nothing_is_read() -> Iterator[None]:
    # On CPU tensors, these read memory without an operator that dispatch could see.
    refused = {name: _refuse(name) for name in ("tolist", "numpy", "cpu")}
    with mock.patch.multiple(Tensor, **refused), _NoReads():
        yield


def _refuse(name: str) -> Callable[..., None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError(f"Tensor.{name} waits for the device")

    return refuse


_WRAPPERS: dict[str, Callable[..., Any]] = {
    **CONTAINERS,
    "reduced": lambda module: BucketedDataParallel(module, 0.0016, reduction_dtype=torch.bfloat16),
    "wide": lambda module: BucketedDataParallel(module, 0.0016, reduction_dtype=torch.float64),
    "zero2": lambda module: ShardedDataParallel(module, 0.0016),
}


def _step(rank: int, _world_size: int, container: str) -> None:
    ours = _WRAPPERS[container](Layered())
    optimizer = (
        ShardedOptimizer(ours.parameters(), torch.optim.SGD, lr=0.1)
        if container.startswith("zero2")
        else torch.optim.SGD(ours.parameters(), lr=0.1)
    )
    for step in range(3):
        with _nothing_is_read():
            ours.set_gradient_weight([3.0, 0.0][rank])
            with ours.no_sync():
                loss_of(ours(data(step, rank), rank)).backward()
            loss_of(ours(data(step + 10, rank), rank)).backward()
            ours.finish_gradient_synchronization()
            ours.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("container", _WRAPPERS)
def test_nothing_is_read_on_the_host_before_the_optimizers_step(
    rank_pool: Pools, container: str
) -> None:
    rank_pool(2).run(_step, container)


class _OnlyWaited:
    """A message that can be waited for, but not polled for completion."""

    def __init__(self, work: Any, waited: list[int]) -> None:
        self._work = work
        self._waited = waited

    def wait(self) -> None:
        self._work.wait()
        self._waited.append(1)


def _live_messages(rank: int, _world_size: int, container: str) -> int:
    """Returns the maximum number of live messages, counted whenever one is started."""
    gc.collect()  # A dropped container has a pending backward until it is freed.
    ours = _WRAPPERS[container](Layered())
    bucket_class = ShardedBucket if container.startswith("zero2") else Bucket
    original = bucket_class.start
    started: list[int] = []
    waited: list[int] = []
    alive = []

    def start(bucket: Any, message: Tensor, group: dist.ProcessGroup) -> Any:
        started.append(1)
        alive.append(len(started) - len(waited))
        return _OnlyWaited(original(bucket, message, group), waited)

    with mock.patch.object(bucket_class, "start", start):
        loss_of(ours(data(0, rank), rank)).backward()
    assert len(started) > 3
    return max(alive)


@pytest.mark.parametrize("container", ["reduced", "wide", "zero2"])
def test_two_messages_are_alive_at_most_whatever_the_host_knows_of_them(
    rank_pool: Pools, container: str
) -> None:
    assert max(rank_pool(2).run(_live_messages, container)) == 2
