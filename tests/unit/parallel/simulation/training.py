"""Small training programs for simulated ranks, and their expected results from one process.

A schedule is one training step of a program, in the order that a seed decides, and the next forward
pass, which may still wait for parameters. Every schedule starts from the same parameters, so the
expected results are computed once per program.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.unit.parallel.simulation.device import Device
from tests.unit.parallel.simulation.scheduler import Scheduler, ViolationError

WIDTH = 4
RATE = 0.1


class Chain(nn.Module):
    """Layers that a program may leave unused, even on one rank only, or run in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=n == 1) for n in range(3))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, order: Sequence[int], used: Sequence[int]) -> Tensor:
        for number in order:
            y = torch.tanh(self.blocks[number](x))
            # Unused layers run too: fully sharded ranks must all run the same layers.
            x = x + y if number in used else x
        return x * self.scale.sum()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """One micro-batch."""

    synchronizes: bool = True
    order: tuple[tuple[int, ...], ...] = ((0, 1, 2),)
    """The order of the layers by rank, repeated if there are more ranks."""
    used: tuple[tuple[int, ...], ...] = ((0, 1, 2),)
    """The layers that the loss depends on by rank, repeated if there are more ranks."""
    weights: tuple[float, ...] | None = None


Program = tuple[Pass, ...]

PROGRAMS: dict[str, Program] = {
    "one pass": (Pass(),),
    "accumulated": (Pass(), Pass()),
    "accumulated locally": (Pass(synchronizes=False), Pass()),
    "unused": (Pass(used=((0, 2),)),),
    "unused on one rank": (Pass(used=((0, 1, 2), (0, 2), (2,))),),
    "weighted": (Pass(weights=(3.0, 1.0, 0.0)),),
}
"""Programs for all containers."""

ANY_ORDER: dict[str, Program] = {
    "another order on every rank": (Pass(order=((0, 1, 2), (2, 1, 0), (1, 0, 2))),)
}
"""Programs for containers that do not gather layers in forward order."""


def data(rank: int, number: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Chain()


def _of_rank(by_rank: Sequence[Any], rank: int) -> Any:
    return by_rank[rank % len(by_rank)]


def _loss(model: nn.Module, one: Pass, rank: int, number: int) -> Tensor:
    output = model(data(rank, number), _of_rank(one.order, rank), _of_rank(one.used, rank))
    return output.square().mean()


@dataclasses.dataclass
class Expected:
    """The final state of one process."""

    parameters: list[Tensor]
    loss: list[Tensor]
    """Losses of the next forward pass by rank."""


def expected_of(program: Program, num_ranks: int) -> Expected:
    model = make_model()
    for number, one in enumerate(program):
        weights = one.weights[:num_ranks] if one.weights else (1.0,) * num_ranks
        losses = (_loss(model, one, rank, number) * w for rank, w in enumerate(weights))
        (sum(losses) / sum(weights)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(RATE * parameter.grad)
        losses = [_loss(model, program[0], rank, 9) for rank in range(num_ranks)]
    return Expected([parameter.detach() for parameter in model.parameters()], losses)


class Trainee:
    """One rank's container and optimizer, which are reset for every schedule."""

    def __init__(
        self, container: nn.Module, optimizer: Any, full: Callable[[], Sequence[Tensor]]
    ) -> None:
        self.container = container
        self._optimizer = optimizer
        self._full = full
        self.after_step: Callable[[], None] = _nothing
        """Called between the optimizer step and the next forward pass."""
        self._local = [local(parameter) for parameter in container.parameters()]
        self._initial = [tensor.clone() for tensor in self._local]

    def reset(self) -> None:
        self._optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self._local, self._initial)

    def run(self, program: Program, rank: int) -> tuple[Sequence[Tensor], Tensor]:
        """Runs a program; returns the full parameters and the loss of the next forward pass."""
        for number, one in enumerate(program):
            if one.weights:
                self.container.set_gradient_weight(one.weights[rank])
            silent = contextlib.nullcontext() if one.synchronizes else self.container.no_sync()
            with silent:
                _loss(self.container, one, rank, number).backward()
        self._optimizer.step()
        self.after_step()
        with torch.no_grad():
            loss = _loss(self.container, program[0], rank, 9)
        return [tensor.detach().clone() for tensor in self._full()], loss


def _nothing() -> None:
    pass


def local(parameter: Tensor) -> Tensor:
    """Returns this rank's elements of a parameter."""
    detached = parameter.detach()
    return detached.to_local() if hasattr(detached, "to_local") else detached


def explore(
    scheduler: Scheduler,
    device: Device,
    make: Callable[[], Trainee],
    programs: dict[str, Program],
    seeds: Sequence[int],
) -> None:
    """Runs one schedule per seed; raises at the first wrong one, with its seed in a note."""
    expected = {name: expected_of(one, scheduler.num_ranks) for name, one in programs.items()}
    names = list(programs)
    trainees = scheduler.run(lambda _rank: make(), seed=0)
    device.reset()
    for seed in seeds:
        name = names[seed % len(names)]
        program = programs[name]

        def schedule(rank: int, program: Program = program) -> Any:
            trainees[rank].reset()
            return trainees[rank].run(program, rank)

        try:
            for rank, (parameters, loss) in enumerate(scheduler.run(schedule, seed)):
                _require_close(parameters, loss, expected[name], rank)
            device.reset()
        except BaseException as error:
            device.clear()
            error.add_note(f"program {name!r}, {scheduler.num_ranks} ranks, seed {seed}")
            raise


def _require_close(
    parameters: Sequence[Tensor], loss: Tensor, expected: Expected, rank: int
) -> None:
    ours = torch.cat([tensor.detach().reshape(-1) for tensor in [*parameters, loss]])
    theirs = torch.cat([t.reshape(-1) for t in [*expected.parameters, expected.loss[rank]]])
    difference = ((ours - theirs).abs() / (1 + theirs.abs())).amax()
    if not difference < 1e-5:
        raise ViolationError(f"rank {rank} differs from one process by {float(difference):.3g}")
