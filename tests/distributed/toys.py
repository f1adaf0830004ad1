"""Small models, each with a feature that data-parallel containers can get wrong, and their oracle.

The oracle is one process with the data of all ranks. Models take the rank as an argument, so that
the oracle can reproduce what each rank computes.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.parallel import (
    BucketedDataParallel,
    FlatDataParallel,
    NaiveDataParallel,
    OverlappedDataParallel,
    OverlapWarning,
)

WIDTH = 10


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 40)
        self.second = nn.Linear(40, 40, bias=False)
        self.third = nn.Linear(40, WIDTH)

    def forward(self, x: Tensor, _rank: int) -> Tensor:
        return self.third(F.gelu(self.second(F.gelu(self.first(x)))))


class Frozen(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.second.weight.requires_grad_(False)


class Tied(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(40, 40, bias=False)
        self.extra.weight = self.second.weight

    def forward(self, x: Tensor, _rank: int) -> Tensor:
        return self.third(F.gelu(self.extra(F.gelu(self.second(F.gelu(self.first(x)))))))


class Unused(Layered):
    """Has a layer that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, WIDTH)


class UnusedOnOneRank(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return super().forward(x if rank == 1 else self.side(x), rank)


class OrderByRank(nn.Module):
    """Layers whose gradients arrive in reverse order on every other rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        for layer in self.layers if rank % 2 else reversed(self.layers):
            x = F.gelu(layer(x))
        return x


class Shapes(nn.Module):
    """A scalar, an empty tensor, several kinds of strides, and several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(WIDTH, 7).T)
        self.stepped = nn.Parameter(torch.randn(WIDTH, 14)[:, ::2])
        self.kernel = nn.Parameter(
            torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        )
        self.precise = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        with torch.no_grad():  # Small values keep rounding errors of their products small.
            for parameter in self.parameters():
                parameter.mul_(0.3)

    def forward(self, x: Tensor, _rank: int) -> Tensor:
        x = (x.double() @ self.precise).float() + self.empty.sum()
        y = torch.cat((x @ self.turned.T, x @ self.stepped), dim=1)[:, :12].reshape(-1, 3, 2, 2)
        phases = (x * self.phase).abs()
        return self.scale * F.conv2d(y, self.kernel).flatten(1) + phases[:, :4]


class Branching(nn.Module):
    """Returns nested outputs, of which the loss uses only one."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, _rank: int) -> Any:
        return {"pair": (self.left(x), [self.right(x)]), "size": x.shape[0]}


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool, shared: bool = False) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.head = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        if shared:
            # Reentrant checkpoints complete the shared gradient three times in one backward pass.
            self.blocks = nn.ModuleList([self.blocks[0]] * 3)

    def forward(self, x: Tensor, _rank: int) -> Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = checkpoint(lambda y, b=block: F.gelu(b(y)), x, use_reentrant=self.use_reentrant)
        return self.head(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layered": Layered,
    "frozen": Frozen,
    "tied": Tied,
    "unused": Unused,
    "unused_on_one_rank": UnusedOnOneRank,
    "order_by_rank": OrderByRank,
    "shapes": Shapes,
    "branching": Branching,
    "checkpoint": lambda: Checkpointed(use_reentrant=False),
    "reentrant_checkpoint": lambda: Checkpointed(use_reentrant=True),
    "shared_reentrant_checkpoint": lambda: Checkpointed(use_reentrant=True, shared=True),
}

CONTAINERS: dict[str, Callable[..., nn.Module]] = {
    "naive": NaiveDataParallel,
    "flat": FlatDataParallel,
    "overlapped": OverlappedDataParallel,
    "ddp": lambda module, **kw: BucketedDataParallel(module, 0.0016, **kw),
    "one_bucket": lambda module, **kw: BucketedDataParallel(module, None, **kw),
}


def data(step: int, rank: int) -> Tensor:
    return torch.randn((6, WIDTH), generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(output: Any) -> Tensor:
    if isinstance(output, dict):
        output = output["pair"][1][0]
    return output.square().mean()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # Momentum and weight decay update a parameter with a zero gradient, but not one without any.
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def oracle_backward(model: nn.Module, step: int, world_size: int) -> None:
    total = sum(loss_of(model(data(step, rank), rank)) for rank in range(world_size))
    (total / world_size).backward()


def make_pair(
    rank: int, model_name: str, container_name: str, **keywords: Any
) -> tuple[nn.Module, nn.Module]:
    """Returns a container, built from weights that differ by rank, and its oracle."""
    warnings.simplefilter("ignore", OverlapWarning)  # Some toys have unused parameters.
    torch.manual_seed(rank)
    container = CONTAINERS[container_name](MODELS[model_name](), **keywords)
    torch.manual_seed(0)
    return container, MODELS[model_name]()


def require_equal(container: nn.Module, oracle: nn.Module, *, tolerance: float = 1e-6) -> None:
    """Requires bitwise equal parameters and gradients on all ranks, close to the oracle's."""
    pairs = zip(container.parameters(), oracle.parameters(), strict=True)
    for (name, _), (own, expected) in zip(container.named_parameters(), pairs, strict=True):
        assert (own.grad is None) == (expected.grad is None), f"{name}: a gradient on one side only"
        for kind, ours, theirs in (("value", own, expected), ("grad", own.grad, expected.grad)):
            if ours is None:
                continue
            require_identical(ours.detach(), f"{kind} of {name}")
            torch.testing.assert_close(
                ours.detach(),
                theirs.detach(),
                atol=tolerance,
                rtol=tolerance,
                msg=lambda text, kind=kind, name=name: f"{kind} of {name}: {text}",
            )


def require_identical(tensor: Tensor, what: str) -> None:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else None
    if raw is None:
        return
    reference = raw.clone()
    dist.broadcast(reference, 0)
    assert torch.equal(reference, raw), f"{what}: rank {dist.get_rank()} differs from rank 0"
