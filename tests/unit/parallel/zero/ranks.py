"""Ranks that are threads of the test's process, a model of loose parts, and its oracle.

A part's gradient depends on its value, the rank and the number of the pass, so that a value that
is not the newest, a gradient that is lost or one that counts twice shows in the next step. The
oracle is one process with the data of all ranks.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from paceline.parallel import ShardedDataParallel, ShardedOptimizer
from paceline.parallel.zero.flat_parameters import FlatParameters
from tests.unit.parallel.simulation.device import Device
from tests.unit.parallel.simulation.group import simulated_ranks
from tests.unit.parallel.simulation.messages import Message
from tests.unit.parallel.simulation.object_collectives import object_collectives
from tests.unit.parallel.simulation.scheduler import Scheduler

Program = Callable[[int], Any]

SHAPES: tuple[tuple[int, ...], ...] = ((3,), (2, 5), (7,), (), (5, 2))
"""None of them fills its last 16 bytes, so that every bucket has padding between its tensors."""
ONE_EACH = 16 / 2**20
"""Size of a bucket in MiB, for one parameter in each."""
TWO_EACH = 64 / 2**20
DECAYING: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
"""Options with which a gradient of zero changes a parameter, and no gradient does not."""


@dataclasses.dataclass
class Ranks:
    """Ranks that run programs, one program after another."""

    scheduler: Scheduler
    device: Device
    events: list[list[str]]
    """What each rank has sent and waited for, in its order."""

    def run(self, program: Program, seed: int = 0) -> list[Any]:
        """Returns what a program returns on each rank; raises if a message is not waited for."""
        for events in self.events:
            events.clear()
        results = self.scheduler.run(program, seed)
        self.device.reset()
        return results


@contextlib.contextmanager
def zero_ranks(num_ranks: int) -> Iterator[Ranks]:
    """Runs ranks as threads; memory that nobody has written to is NaN."""
    were_deterministic = torch.are_deterministic_algorithms_enabled()
    with simulated_ranks(num_ranks) as (scheduler, device), object_collectives():
        events: list[list[str]] = [[] for _ in range(num_ranks)]
        launch, wait = device.launch, device.wait

        def noted_launch(group: str, ranks: Sequence[int], kind: str, **sides: Any) -> Any:
            numel = sum(tensor.numel() for tensor in sides["inputs"])
            dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in sides["inputs"]}
            events[device.rank].append(f"send {kind} {numel} {'+'.join(dtypes)}")
            return launch(group, ranks, kind, **sides)

        def noted_wait(message: Message) -> None:
            events[device.rank].append(f"wait {message.name.partition(' ')[0]}")
            wait(message)

        torch.use_deterministic_algorithms(True)
        try:
            with (
                mock.patch.object(device, "launch", noted_launch),
                mock.patch.object(device, "wait", noted_wait),
            ):
                yield Ranks(scheduler, device, events)
        finally:
            torch.use_deterministic_algorithms(were_deterministic)


def on_ranks(num_ranks: int, program: Program) -> list[Any]:
    """Returns what a program returns on each rank."""
    with zero_ranks(num_ranks) as ranks:
        return ranks.run(program)


class Part(nn.Module):
    """A parameter of its own, which is in the loss with what its rank has for it."""

    def __init__(self, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.seed = seed
        self.value = nn.Parameter(_random(shape, seed, dtype))

    def forward(self, rank: int, number: int) -> Tensor:
        """Returns the part's summand of the loss in a pass."""
        value = self.value
        own = _random(value.shape, 1000 * (number + 1) + 100 * (rank + 1) + self.seed, value.dtype)
        product = value * own + value * value.conj() / 4
        return (product.real if product.is_complex() else product).sum()


class Parts(nn.Module):
    """Parts of which each rank may leave some out of its loss."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(shape, seed, dtype) for seed, shape in enumerate(shapes))

    def forward(self, rank: int, number: int, used: Sequence[int] | None = None) -> Tensor:
        """Returns the loss of a rank in a pass.

        Args:
            rank: The rank whose data it is.
            number: The number of the pass.
            used: The parts that count; all by default.
        """
        chosen = range(len(self.parts)) if used is None else used
        return torch.stack([self.parts[index](rank, number).float() for index in chosen]).sum()


def _random(shape: Sequence[int], seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(tuple(shape), generator=generator, dtype=wide).to(dtype)


class Twins:
    """A rank's container and optimizer, and one process that has the data of all ranks.

    Args:
        rank: This rank.
        num_ranks: The number of ranks.
        make: Makes the model.
        bucket_size_mb: As for the container.
        optimizer_cls: The optimizer's class.
        options: The optimizer's options.
        keywords: As for the container.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        make: Callable[[], nn.Module] = Parts,
        *,
        bucket_size_mb: float | None = TWO_EACH,
        optimizer_cls: type[Optimizer] = SGD,
        options: dict[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        options = DECAYING if options is None else options
        self.alone = make()
        self.whole = optimizer_cls(self.alone.parameters(), **options)
        self.ours = ShardedDataParallel(make(), bucket_size_mb, **keywords)
        self.sharded = ShardedOptimizer(self.ours.parameters(), optimizer_cls, **options)

    @property
    def flats(self) -> Sequence[FlatParameters]:
        """The container's flat parameters, in the order of forward."""
        return self.ours._shared.flats

    def backward(self, number: int, *used: Sequence[int], only_here: bool = False) -> None:
        """Runs a pass on both sides.

        Args:
            number: The number of the pass.
            used: The parts that count by rank, if not all do.
            only_here: Whether the oracle is left out.
        """
        self.ours(self._rank, number, used[self._rank] if used else None).backward()
        if only_here:
            return
        losses = [
            self.alone(rank, number, used[rank] if used else None)
            for rank in range(self._num_ranks)
        ]
        (torch.stack(losses).sum() / self._num_ranks).backward()

    def step(self, *, clear: bool = True, set_to_none: bool = True) -> None:
        """Updates both sides."""
        for optimizer in (self.sharded, self.whole):
            optimizer.step()
            if clear:
                optimizer.zero_grad(set_to_none=set_to_none)

    def require_equal(self) -> None:
        """Requires that both sides have the same parameters."""
        pairs = zip(self.ours.named_parameters(), self.alone.parameters(), strict=True)
        for (name, own), expected in pairs:
            torch.testing.assert_close(
                own.detach(),
                expected.detach(),
                rtol=1e-5,
                atol=1e-6,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def raw(parameter: Tensor) -> Tensor:
    """Returns a parameter's memory as it is, without waiting for values in flight."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.detach().clone()
