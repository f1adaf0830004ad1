"""Random programs of an outer loop: sites of one or two ranks, any strategy inside, any settings.

A parameter's gradient is made of few bits and of powers of two, so that sums, means and steps of
the inner optimizer are exact in any order, whatever the strategy. Everything that is rounded is
rounded by the outer loop. Each step's parameters are compared, so that an average that is applied a
step too early or too late shows.
"""

import dataclasses
import io
import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from paceline.core.outer import OuterCompression
from paceline.parallel import (
    BucketedDataParallel,
    FullyShardedDataParallel,
    ShardedDataParallel,
    ShardedOptimizer,
)
from paceline.parallel.dtensor import local_tensor
from paceline.parallel.outer.loop import OuterLoop
from tests import devices

RATE = 0.125
_SHAPES: tuple[tuple[int, ...], ...] = ((40, 30), (7,), (3, 100), (), (513,), (2, 2), (260, 3))
STRATEGIES = ("none", "ddp", "torch_ddp", "zero1", "zero2", "fsdp", "torch_fsdp2")


@dataclasses.dataclass(frozen=True)
class Program:
    """A run of several sites."""

    seed: int
    num_sites: int
    site_ranks: int
    strategy: str
    divides: bool
    """Whether the ranks of a site divide what they replicate."""
    shapes: tuple[tuple[int, ...], ...]
    frozen: tuple[int, ...]
    ties: bool
    """Whether the last parameter is the first one again."""
    dtype: str
    every_steps: int
    fragments: int
    delay_steps: int
    learning_rate: float
    momentum: float
    compression: OuterCompression
    steps: int
    resumes_at: int | None
    """Step after which the run is saved, and goes on from what was saved."""
    equal_starts: bool
    """Whether all sites make the same model."""

    @classmethod
    def of(cls, seed: int, num_sites: int, site_ranks: int) -> "Program":
        """Returns the program of a seed."""
        chance = random.Random(f"outer {seed}")
        strategy = STRATEGIES[seed % len(STRATEGIES)]
        if site_ranks > 1 and strategy == "none":
            strategy = "ddp"
        shapes = tuple(chance.choices(_SHAPES, k=chance.randint(2, 6)))
        frozen = tuple(n for n in range(1, len(shapes)) if chance.random() < 0.15)
        every_steps = chance.randint(1, 6)
        fragments = chance.randint(1, min(3, every_steps, len(shapes) - len(frozen)))
        steps = chance.randint(1, 2 * every_steps + 3)
        # FSDP2 refuses scalars, and DDP has to see every parameter in the loss.
        if strategy == "torch_fsdp2":
            shapes = tuple(shape or (5,) for shape in shapes)
        return cls(
            seed=seed,
            num_sites=num_sites,
            site_ranks=site_ranks,
            strategy=strategy,
            divides=chance.random() < 0.7,
            shapes=shapes,
            frozen=frozen,
            ties=chance.random() < 0.3,
            dtype=chance.choice(("float32", "float32", "bfloat16", "float64")),
            every_steps=every_steps,
            fragments=fragments,
            delay_steps=chance.randint(0, every_steps // fragments - 1),
            learning_rate=chance.choice((1.0, 0.7, 0.3)),
            momentum=chance.choice((0.0, 0.0, 0.5, 0.9)),
            compression=chance.choice(("none", "bf16", "int8", "int4", "int4")),
            steps=steps,
            resumes_at=chance.choice((None, chance.randint(0, steps))),
            equal_starts=chance.random() < 0.5,
        )

    def model(self, site: int) -> "Layers":
        """Returns a site's model before training."""
        return Layers(self, site)

    def gradient(self, number: int, site: int, rank: int, step: int) -> Tensor:
        """Returns a gradient of a parameter, before the mean over the ranks of a site."""
        draw = torch.Generator().manual_seed(hash((self.seed, number, site, rank, step)) % 2**31)
        shape = self.shapes[number]
        numbers = torch.randint(-8, 9, shape, generator=draw, dtype=torch.float64)
        scale = 2.0 ** random.Random(f"{self.seed} {number} {step}").randint(-9, 0)
        return (numbers * scale).to(getattr(torch, self.dtype))


class Layer(nn.Module):
    """One parameter, whose gradient is what the caller gives."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum(dtype=torch.float64)


class Layers(nn.Module):
    """Parameters of a program; the first may be used again under another name."""

    def __init__(self, program: Program, site: int) -> None:
        super().__init__()
        start = 0 if program.equal_starts else site
        draw = torch.Generator().manual_seed(hash((program.seed, start)) % 2**31)
        made = []
        for number, shape in enumerate(program.shapes):
            values = torch.randn(shape, generator=draw, dtype=torch.float64)
            weight = nn.Parameter(values.to(getattr(torch, program.dtype)))
            weight.requires_grad_(number not in program.frozen)
            made.append(weight)
        self.first = Layer(made[0])
        self.others = nn.ModuleList(Layer(weight) for weight in made[1:])
        self.last = Layer(made[0]) if program.ties else None

    def forward(self, gradients: list[Tensor]) -> Tensor:
        total = self.first(gradients[0])
        for layer, gradient in zip(self.others, gradients[1:], strict=True):
            total = total + layer(gradient)
        return total if self.last is None else total + self.last(gradients[0])


class Trainee:
    """A rank's model, optimizer and outer loop."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program = program
        self.site, self.place = divmod(rank, program.site_ranks)
        across, inside = groups(program.num_sites, program.site_ranks)
        self.model = program.model(self.site).to(devices.device_of(rank))
        self.wrapped = wrap(self.model, program.strategy, inside)
        optimizer_cls = ShardedOptimizer if program.strategy in ("zero1", "zero2") else None
        self.optimizer: Optimizer
        if optimizer_cls is None:
            self.optimizer = SGD(self.wrapped.parameters(), lr=RATE)
        else:
            self.optimizer = optimizer_cls(
                list(self.wrapped.parameters()), SGD, process_group=inside, lr=RATE
            )
        self.outer = OuterLoop(
            self.wrapped,
            self.optimizer,
            group=across,
            inner_group=inside if program.divides else None,
            every_steps=program.every_steps,
            fragments=program.fragments,
            delay_steps=program.delay_steps,
            learning_rate=program.learning_rate,
            momentum=program.momentum,
            compression=program.compression,
        )

    def step(self, step: int) -> None:
        """Trains for a step, which is counted from 1."""
        numbers = range(len(self.program.shapes))
        device = devices.own_device()
        gradients = [
            self.program.gradient(number, self.site, self.place, step).to(device)
            for number in numbers
        ]
        self.wrapped(gradients).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def locals(self) -> list[Tensor]:
        """Returns copies of what this rank holds of all parameters."""
        parameters = self.wrapped.parameters()
        return [local_tensor(parameter).detach().clone() for parameter in parameters]

    def saved(self) -> bytes:
        """Returns all that a site saves of this rank."""
        file = io.BytesIO()
        torch.save({"outer": self.outer.state_dict(), "model": self.locals()}, file)
        return file.getvalue()

    @torch.no_grad()
    def load(self, saved: bytes) -> None:
        """Restores what was saved."""
        state = torch.load(io.BytesIO(saved), weights_only=True)
        for parameter, values in zip(self.wrapped.parameters(), state["model"], strict=True):
            local_tensor(parameter).copy_(values)
        self.outer.load_state_dict(state["outer"])


_made: dict[tuple[int, int], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def groups(num_sites: int, site_ranks: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Returns this rank's counterparts, and the ranks of its site; made once in a process."""
    if (num_sites, site_ranks) not in _made:
        site, place = divmod(dist.get_rank(), site_ranks)
        across = [
            dist.new_group([one * site_ranks + other for one in range(num_sites)])
            for other in range(site_ranks)
        ]
        inside = [
            dist.new_group([one * site_ranks + other for other in range(site_ranks)])
            for one in range(num_sites)
        ]
        found = across[place], inside[site]
        assert isinstance(found[0], dist.ProcessGroup)
        assert isinstance(found[1], dist.ProcessGroup)
        _made[num_sites, site_ranks] = found
    return _made[num_sites, site_ranks]


def wrap(model: nn.Module, strategy: str, inside: dist.ProcessGroup) -> nn.Module:
    """Wraps a model over the ranks of a site."""
    if strategy == "none":
        return model
    if strategy == "torch_ddp":
        return DistributedDataParallel(model, process_group=inside)
    if strategy == "torch_fsdp2":
        mesh = DeviceMesh.from_group(inside, devices.own_device().type)
        for part in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
            for layer in part:
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    containers: dict[str, Any] = {
        "ddp": BucketedDataParallel,
        "zero1": BucketedDataParallel,
        "zero2": ShardedDataParallel,
        "fsdp": FullyShardedDataParallel,
    }
    wrapped: nn.Module = containers[strategy](model, process_group=inside)
    return wrapped


def train(rank: int, _world_size: int, programs: list[Program]) -> list[list[list[Tensor]]]:
    """Returns what this rank holds of each program's parameters after each step and at the end."""
    return [_train(rank, program) for program in programs]


def _train(rank: int, program: Program) -> list[list[Tensor]]:
    trainee = Trainee(program, rank)
    seen = []
    for step in range(program.steps + 1):
        if step:
            trainee.step(step)
            seen.append(trainee.locals())
        if step == program.resumes_at:
            saved = trainee.saved()
            trainee.outer.close()
            trainee = Trainee(dataclasses.replace(program, equal_starts=True), rank)
            trainee.load(saved)
    trainee.outer.finish()
    assert devices.hazards() == []
    return [*seen, trainee.locals()]
