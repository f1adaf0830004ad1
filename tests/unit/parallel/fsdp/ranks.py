"""Ranks that are threads of the test's process, and a log of what each of them does.

A rank's log has the messages that it launches, on request those that it waits for, and what the
program notes. Blocks of different sizes make the messages of each layer known by their sizes.
"""

import contextlib
import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel import same_model
from paceline.parallel.dtensor import local_tensor
from tests.unit.parallel.simulation.device import Device
from tests.unit.parallel.simulation.group import simulated_ranks
from tests.unit.parallel.simulation.messages import Message
from tests.unit.parallel.simulation.scheduler import Scheduler

Note: TypeAlias = Callable[[str], None]
_NAME = re.compile(r"(\S+) of (\S+) x (?:torch\.)?(\S+)(?: among (\d+))?")


@dataclasses.dataclass
class Ranks:
    """Ranks that run programs, one program after another."""

    scheduler: Scheduler
    device: Device
    _num_taken: dict[int, int] = dataclasses.field(default_factory=lambda: defaultdict(int))

    def run(self, program: Callable[[int], Any], seed: int = 0) -> list[Any]:
        """Returns what a program returns on each rank; raises if a message was not waited for."""
        try:
            results = self.scheduler.run(program, seed)
            self.device.reset()
        except BaseException:
            self.device.clear()
            raise
        finally:
            self._num_taken.clear()
        return results

    def note(self, text: str) -> None:
        """Adds a line to the log of the current rank."""
        self.device.launches[self.device.rank].append(text)

    def taken(self) -> list[str]:
        """Returns the log of the current rank since the last call."""
        rank = self.device.rank
        lines = self.device.launches[rank][self._num_taken[rank] :]
        self._num_taken[rank] += len(lines)
        return [_short(line, self.scheduler.num_ranks) for line in lines]

    @contextlib.contextmanager
    def noting_waits(self) -> Iterator[None]:
        """Adds the messages that ranks wait for to their logs."""
        wait = self.device.wait

        def noted(message: Message) -> None:
            self.note(f"wait for {message.name}")
            wait(message)

        with mock.patch.object(self.device, "wait", noted):
            yield


def _short(line: str, num_ranks: int) -> str:
    """Returns a line without the dtype and the number of ranks that messages usually have."""

    def shortened(found: re.Match[str]) -> str:
        kind, size, dtype, among = found.groups()
        dtype = "" if dtype == "float32" else f" {dtype}"
        others = f" among {among}" if among and int(among) != num_ranks else ""
        return f"{kind} {size}{dtype}{others}"

    return _NAME.sub(shortened, line)


@contextlib.contextmanager
def fsdp_ranks(num_ranks: int) -> Iterator[Ranks]:
    """Runs ranks as threads that shard models together."""
    with simulated_ranks(num_ranks) as (scheduler, device):

        def appears(store: dist.Store, key: str, _within: timedelta) -> bool:
            scheduler.wait(device.rank, lambda: bool(store.check([key])))
            return True

        with mock.patch.object(same_model, "_appears", appears):
            yield Ranks(scheduler, device)


def gather(*numbers: int) -> list[str]:
    """Returns the launches of all-gathers of blocks, by number, between two ranks."""
    return [f"all-gather {4 * (number + 1)}" for number in numbers]


def send(*numbers: int) -> list[str]:
    """Returns the launches of the gradient messages of blocks, by number, between two ranks."""
    return [f"reduce-scatter {2 * (4 * (number + 1) + 4)}" for number in numbers]


class Block(nn.Module):
    """A layer with eight elements more than the one before it, which notes when it runs."""

    def __init__(self, number: int, note: Note) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8 * (number + 1)))
        self.number = number
        self.note = note
        self.seen: list[Any] = []
        """Its full parameter, once it has run."""

    def forward(self, x: Tensor) -> Tensor:
        self.note(f"forward {self.number}")
        self.seen[:] = [(self.weight,)]
        y = x * (2 + torch.tanh(self.weight * x.mean()).mean()) + self.weight[0]
        return _Noted.apply(y, lambda: self.note(f"backward {self.number}"))

    @property
    def is_present(self) -> bool:
        """Whether its full parameter has memory."""
        return any(full.untyped_storage().nbytes() > 0 for (full,) in self.seen)


class _Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.note()
        return gradients[0], None


class Blocks(nn.Module):
    """Blocks in a row, or in an order that the caller chooses."""

    def __init__(self, note: Note, num_blocks: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number, note) for number in range(num_blocks))

    def forward(self, x: Tensor, order: Sequence[int] | None = None) -> Tensor:
        for number in range(len(self.blocks)) if order is None else order:
            x = self.blocks[number](x)
        return x

    def present(self) -> list[int]:
        """Returns the numbers of the blocks whose full parameters have memory."""
        return [block.number for block in self.blocks if block.is_present]


def data(step: int, rank: int, size: int = 4) -> Tensor:
    """Returns the input of a rank."""
    return torch.randn(2, size, generator=torch.Generator().manual_seed(100 * step + rank))


def silent(_text: str) -> None:
    """Notes nothing, as an oracle does."""


def own_rows(full: Tensor, rank: int, num_ranks: int) -> Tensor:
    """Returns a rank's rows, as torch divides them."""
    if not full.dim():
        return full
    chunks = full.chunk(num_ranks)
    return chunks[rank] if rank < len(chunks) else full[:0]


def require_gradients(
    ours: nn.Module, oracle: nn.Module, rank: int, num_ranks: int, tolerance: float = 1e-6
) -> None:
    """Requires that a rank has its rows of the oracle's gradients, and none where it has none."""
    expected = dict(oracle.named_parameters())
    for name, own in ours.named_parameters():
        gradient = expected[name].grad
        assert (own.grad is None) == (gradient is None), name
        if own.grad is not None and gradient is not None:
            rows = own_rows(gradient, rank, num_ranks)
            _require_close(local_tensor(own.grad), rows, tolerance, f"gradient of {name}")


def require_values(ours: Any, oracle: nn.Module, tolerance: float = 1e-6) -> None:
    """Requires that the full state of a container is the oracle's."""
    state = ours.full_state_dict()
    assert list(state) == list(oracle.state_dict())
    for name, expected in oracle.state_dict().items():
        assert type(state[name]) is Tensor, name
        _require_close(state[name], expected, tolerance, name)


def _require_close(own: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    torch.testing.assert_close(
        own.detach(),
        expected.detach(),
        atol=tolerance,
        rtol=tolerance,
        msg=lambda text: f"{what}: {text}",
    )
