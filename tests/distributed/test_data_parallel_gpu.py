"""The containers on GPUs with NCCL, for the acceptance run of whoever has some."""

import pytest
import torch

from paceline.parallel import BucketedDataParallel, RankPool
from tests.distributed.toys import CONTAINERS, Layered, data, loss_of, require_identical

pytestmark = pytest.mark.gpu


def _train(rank: int, world_size: int, container: str) -> None:
    device = torch.device("cuda", rank)
    torch.manual_seed(rank)
    ours = CONTAINERS[container](Layered().to(device))
    torch.manual_seed(0)
    oracle = Layered().to(device)
    for step in range(6):
        loss_of(ours(data(step, rank).to(device), rank)).backward()
        total = sum(
            loss_of(oracle(data(step, other).to(device), other)) for other in range(world_size)
        )
        (total / world_size).backward()
        for own, expected in zip(ours.parameters(), oracle.parameters(), strict=True):
            require_identical(own.grad, "gradient")
            torch.testing.assert_close(own.grad, expected.grad, atol=1e-5, rtol=1e-5)
        ours.zero_grad()
        oracle.zero_grad()
    stats = ours.synchronization_stats()
    assert stats is not None
    assert all(bucket.finish_s > bucket.launch_s > 0 for bucket in stats.buckets)


@pytest.mark.parametrize("container", CONTAINERS)
def test_training_equals_one_process(container: str) -> None:
    with RankPool(torch.cuda.device_count(), backend="nccl", timeout_s=120) as pool:
        pool.run(_train, container)


def _choose(rank: int, _world_size: int) -> float:
    device = torch.device("cuda", rank)
    container = BucketedDataParallel(Layered().to(device), "auto")
    for step in range(6):
        loss_of(container(data(step, rank).to(device), rank)).backward()
    assert container.bucket_size_choice is not None
    return container.bucket_size_choice.bucket_size_mb


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a rank alone has nothing to choose")
def test_ranks_agree_on_a_bucket_size() -> None:
    with RankPool(torch.cuda.device_count(), backend="nccl", timeout_s=120) as pool:
        assert len(set(pool.run(_choose))) == 1
