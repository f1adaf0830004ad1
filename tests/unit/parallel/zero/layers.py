"""Layers that read their memory as code does that torch knows nothing of."""

import torch
from torch import Tensor, nn


class Raw(nn.Module):
    """A layer that reads its memory as code does that torch knows nothing of."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), value))

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return x * self.weight


class Inner(nn.Module):
    """Two layers, of which one is read without a call, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unread = Raw(1.0), Raw(2.0), Raw(9.0)
        self.shift = nn.Parameter(torch.full((4,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.first(x) * self.second.weight + self.shift


class Model(nn.Module):
    """Layers in layers."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.inner, self.end = Raw(0.5), Inner(), Raw(4.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.inner(self.start(x)))


def loss_of(model: nn.Module, rank: int, number: int) -> Tensor:
    return model(torch.arange(4.0) + rank + number).square().mean()
