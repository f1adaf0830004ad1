"""What the courses' own tests do with the adapters, and stricter: different weights per rank."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.parallel import RankPool
from tests import adapters
from tests.distributed.toys import Frozen, Tied, data

Pools = Callable[[int], RankPool]


def _course_loop(
    rank: int, world_size: int, edition: str, tied: bool, bucket_size_mb: float | None
) -> None:
    torch.manual_seed(rank)
    inner = Tied() if tied else Frozen()
    torch.manual_seed(0)
    alone = Tied() if tied else Frozen()
    if edition == "bucketed":
        model = adapters.get_ddp_bucketed(inner, bucket_size_mb=bucket_size_mb)
    elif edition == "individual":
        model = adapters.get_ddp_individual_parameters(inner)
    else:
        model = adapters.get_ddp(inner)
    after = {
        "bucketed": adapters.ddp_bucketed_on_after_backward,
        "individual": adapters.ddp_individual_parameters_on_after_backward,
        "2026": adapters.ddp_on_after_backward,
    }[edition]
    assert model.module is inner
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    loss = nn.MSELoss()
    for step in range(5):
        if edition == "bucketed":
            adapters.ddp_bucketed_on_train_batch_start(ddp_model=model, optimizer=optimizers[0])
        everything = torch.cat([data(step, other) for other in range(world_size)])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(model(data(step, rank), rank), data(step + 50, rank)).backward()
        after(ddp_model=model, optimizer=optimizers[0])
        targets = torch.cat([data(step + 50, other) for other in range(world_size)])
        loss(alone(everything, rank), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
        for (name, expected), (_, actual) in zip(
            alone.named_parameters(), model.named_parameters(), strict=True
        ):
            torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("edition", "bucket_size_mb"),
    [
        ("individual", None),
        ("2026", None),
        *(("bucketed", size) for size in (0.0016, 0.0001, 0.01, None)),
    ],
)
def test_the_courses_loop(
    rank_pool: Pools, edition: str, tied: bool, bucket_size_mb: float | None
) -> None:
    rank_pool(2).run(_course_loop, edition, tied, bucket_size_mb)


def _course_sharded_optimizer(_rank: int, _world_size: int, tied: bool) -> None:
    models, optimizers = [], []
    for sharded in (True, False):
        torch.manual_seed(42)
        model = Tied() if tied else Frozen()
        make = adapters.get_sharded_optimizer if sharded else _make_plain
        models.append(model)
        optimizers.append(make(model.parameters(), torch.optim.AdamW, lr=0.1, weight_decay=0.1))
    for step in range(10):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(data(step, 0), 0).sum().backward()
            optimizer.step()
    for actual, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(actual, expected)


def _make_plain(
    params: Iterable[nn.Parameter], optimizer_cls: type[torch.optim.Optimizer], **options: Any
) -> torch.optim.Optimizer:
    return optimizer_cls(params, **options)


@pytest.mark.parametrize("tied", [False, True])
def test_the_courses_sharded_optimizer(rank_pool: Pools, tied: bool) -> None:
    rank_pool(2).run(_course_sharded_optimizer, tied)


class ToyLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.embedding(tokens)))
        return logits


def _course_fsdp(rank: int, world_size: int, compute_dtype: torch.dtype | None) -> None:
    torch.manual_seed(rank)
    model = adapters.get_fsdp(ToyLanguageModel(), compute_dtype=compute_dtype)
    torch.manual_seed(0)
    alone = ToyLanguageModel()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, alone)]
    tokens = torch.randint(11, (4 * world_size, 6), generator=torch.Generator().manual_seed(3))
    own = tokens[4 * rank : 4 * rank + 4]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(own).float().square().mean().backward()
        adapters.fsdp_on_after_backward(model, optimizers[0])
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.shape == parameter.shape
            assert parameter.grad.dtype == parameter.dtype == torch.float32
        alone(tokens).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    # Half precision has eleven bits, and the gradients are of the order of one.
    tolerance = 1e-6 if compute_dtype is None else 1e-3
    full = adapters.fsdp_gather_full_params(model)
    for name, expected in alone.named_parameters():
        torch.testing.assert_close(
            full[name], expected.detach(), atol=tolerance, rtol=tolerance, msg=name
        )


@pytest.mark.parametrize("compute_dtype", [None, torch.float16])
def test_the_courses_fully_sharded_model(
    rank_pool: Pools, compute_dtype: torch.dtype | None
) -> None:
    rank_pool(2).run(_course_fsdp, compute_dtype)
