"""Acceptance tests of the containers on GPUs with NCCL.

The same checks run at toy size on the device of the session of tests, the CPU or the emulated
accelerator, so that mistakes in a check are found without a GPU.
"""

from collections.abc import Callable, Iterator

import pytest
import torch

from paceline.parallel import BucketedDataParallel, RankPool
from tests import devices
from tests.distributed.acceptance import checks
from tests.distributed.toys import Layered, data, loss_of

Pools = Callable[[int], RankPool]
Property = Callable[[str, object], None]


@pytest.fixture(scope="module")
def nccl_pool() -> Iterator[RankPool]:
    with RankPool(torch.cuda.device_count(), backend="nccl", timeout_s=120) as pool:
        yield pool


@pytest.mark.gpu
@pytest.mark.parametrize("name", checks("cuda"))
def test_on_gpus(nccl_pool: RankPool, name: str, record_property: Property) -> None:
    function, arguments = checks("cuda")[name]
    for metric, number in nccl_pool.run(function, "cuda", *arguments)[0].items():
        record_property(metric, number)


@pytest.mark.parametrize("name", checks("cpu"))
def test_without_gpus(rank_pool: Pools, name: str, record_property: Property) -> None:
    kind = devices.device_of(0).type
    function, arguments = checks(kind)[name]
    for metric, number in rank_pool(2).run(function, kind, *arguments)[0].items():
        record_property(metric, number)


def _choose(rank: int, _world_size: int) -> float:
    device = torch.device("cuda", rank)
    container = BucketedDataParallel(Layered().to(device), "auto")
    for step in range(6):
        loss_of(container(data(step, rank).to(device), rank)).backward()
    assert container.bucket_size_choice is not None
    return container.bucket_size_choice.bucket_size_mb


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a rank alone has nothing to choose")
def test_ranks_agree_on_a_bucket_size(nccl_pool: RankPool) -> None:
    assert len(set(nccl_pool.run(_choose))) == 1
