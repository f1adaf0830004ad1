"""Stricter versions of the courses' own adapter tests: initial weights differ by rank."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
    if edition == "ddp":
        model = adapters.get_ddp_bucketed(inner, bucket_size_mb=bucket_size_mb)
    elif edition == "individual":
        model = adapters.get_ddp_individual_parameters(inner)
    else:
        model = adapters.get_ddp(inner)
    after = {
        "ddp": adapters.ddp_bucketed_on_after_backward,
        "individual": adapters.ddp_individual_parameters_on_after_backward,
        "2026": adapters.ddp_on_after_backward,
    }[edition]
    assert model.module is inner
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    loss = nn.MSELoss()
    for step in range(5):
        if edition == "ddp":
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
        *(("ddp", size) for size in (0.0016, 0.0001, 0.01, None)),
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


class Linear(nn.Module):
    """The course's linear layer: one weight, whose dtype it computes in."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_outputs, num_inputs) / num_inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Embedding(nn.Module):
    def __init__(self, num_tokens: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_tokens, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


class RMSNorm(nn.Module):
    """Computes in float32 and returns the dtype of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return (self.weight * scaled).to(x.dtype)


class ToyLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding(100, 64)
        self.norm1 = RMSNorm(64)
        self.linear1 = Linear(64, 128)
        self.norm2 = RMSNorm(128)
        self.linear2 = Linear(128, 64)
        self.lm_head = Linear(64, 100)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.relu(self.linear1(self.norm1(self.embedding(tokens))))
        logits: Tensor = self.lm_head(self.linear2(self.norm2(x)))
        return logits


def _narrow_gradients(
    model: nn.Module, tokens: Tensor, labels: Tensor, dtype: torch.dtype | None
) -> None:
    """Computes single-process gradients with matrices in `dtype` and norms in float32."""
    narrow = copy.deepcopy(model)
    narrow.zero_grad()
    if dtype is not None:
        for part in narrow.modules():
            if isinstance(part, (Linear, Embedding)):
                part.to(dtype)
    nn.CrossEntropyLoss()(narrow(tokens)[:, -1].float(), labels).backward()
    for wide, own in zip(model.parameters(), narrow.parameters(), strict=True):
        assert own.grad is not None
        wide.grad = own.grad.to(wide.dtype)


def _course_fsdp(rank: int, world_size: int, compute_dtype: torch.dtype | None) -> None:
    torch.manual_seed(rank)
    model = adapters.get_fsdp(ToyLanguageModel(), compute_dtype=compute_dtype)
    torch.manual_seed(0)
    alone = ToyLanguageModel()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, alone)]
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(100, (10 * world_size, 8), generator=generator)
    labels = torch.randint(100, (10 * world_size,), generator=generator)
    own = slice(10 * rank, 10 * rank + 10)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        logits = model(tokens[own])
        nn.CrossEntropyLoss()(logits[:, -1].float(), labels[own]).backward()
        adapters.fsdp_on_after_backward(model, optimizers[0])
        _require_the_courses_gradients(model, world_size)
        _narrow_gradients(alone, tokens, labels, compute_dtype)
        for optimizer in optimizers:
            optimizer.step()
        full = adapters.fsdp_gather_full_params(model)
        tolerance = 1e-6 if compute_dtype is None else 1e-4
        for name, expected in alone.named_parameters():
            torch.testing.assert_close(
                full[name], expected.detach(), atol=tolerance, rtol=1e-4, msg=name
            )


def _require_the_courses_gradients(model: nn.Module, world_size: int) -> None:
    """Requires gradients like their parameters; unsharded ones are plain and equal on all ranks."""
    owners = dict(model.module.named_modules())
    for name, parameter in model.module.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.data.shape
        assert parameter.grad.dtype == parameter.data.dtype == torch.float32
        if not isinstance(owners[name.rpartition(".")[0]], (Linear, Embedding)):
            gathered = [torch.zeros_like(parameter.grad) for _ in range(world_size)]
            dist.all_gather(gathered, parameter.grad)
            assert all(torch.equal(gathered[0], other) for other in gathered)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("compute_dtype", [None, torch.float16])
def test_the_courses_fully_sharded_model(
    rank_pool: Pools, compute_dtype: torch.dtype | None
) -> None:
    rank_pool(2).run(_course_fsdp, compute_dtype)
