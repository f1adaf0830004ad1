"""Optimizers with habits of their own, and pairs of a sharded optimizer and torch's."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

from paceline.parallel import ShardedOptimizer
from tests.unit.parallel.zero.ranks import Parts

PARTITIONS = ["elements", "parameters"]


def make_pair(
    optimizer_cls: type[Optimizer], make: Callable[[], nn.Module] = Parts, **options: Any
) -> tuple[nn.Module, ShardedOptimizer, nn.Module, Optimizer]:
    keywords = {
        name: options.pop(name) for name in ("partition", "process_group") if name in options
    }
    ours, alone = make(), make()
    sharded = ShardedOptimizer(ours.parameters(), optimizer_cls, **keywords, **options)
    return ours, sharded, alone, optimizer_cls(alone.parameters(), **options)


def require_bits(ours: nn.Module, alone: nn.Module) -> None:
    for (name, own), other in zip(ours.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(own, other), name


def backward(number: int, *models: nn.Module) -> None:
    for model in models:
        model(0, number).backward()


class Counting(SGD):
    """Counts its steps in its groups, in a number and a list, and divides its rate by them."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.setdefault("trace", [])

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["trace"].append(group["lr"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = group["lr"] / group["count"] * len(group["trace"])
                    parameter.data.add_(parameter.grad, alpha=-rate)


class Estimating(SGD):
    """Keeps a value in each group that depends on all parameters of the group."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["size"] = sum(parameter.numel() for parameter in group["params"])


class Interrupted(SGD):
    """An optimizer whose step fails."""

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("out of memory")


class TakesMore(SGD):
    """An optimizer whose step has an option."""

    def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-scale)


class Noting(SGD):
    """Notes its steps among what its rank sends."""

    events: list[list[str]]

    def step(self, closure: Any = None) -> Any:
        self.events[dist.get_rank()].append("update")


class Mixed(Optimizer):
    """Keeps state of all kinds: per element, per parameter, and what is no tensor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state.setdefault("step", torch.zeros(()))
                state["step"] += 1
                state.setdefault("sum", torch.zeros_like(parameter))
                state["sum"] += parameter.grad
                state["calls"] = state.get("calls", 0) + 1
                state["scale"] = torch.tensor(0.5) ** state["calls"]
                state["table"] = torch.full((3, 2), float(state["calls"]))
                state["nothing"] = None
                parameter.data.add_(state["sum"], alpha=-group["lr"] * float(state["scale"]))
