"""Random training programs with compressed averages, on ranks and in one process with NumPy.

The oracle shares no code with the package but the layout of buckets: it quantises, sums and feeds
back in NumPy, for all ranks in turn. Parameters must be equal to the last bit.
"""

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.core.units import MIB
from paceline.parallel import BucketedDataParallel, ShardedDataParallel, ShardedOptimizer
from paceline.parallel.buckets import BucketPlan, plan_buckets, tensor_spec
from paceline.parallel.compression.codec import CodeName
from paceline.parallel.zero.flat_parameters import shard_evenly
from tests import devices

_BLOCK = 256
_LEARNING_RATE = 0.0625
"""A power of two: fused and separate multiplication and addition then round alike."""
Floats = NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Program:
    """A short training run."""

    seed: int
    shards: bool
    """Whether gradients are reduce-scattered, and the optimizer's state is sharded."""
    compression: CodeName
    num_ranks: int
    bucket_size_mb: float | None
    widths: tuple[int, ...]
    passes: int
    """Backward passes per step; all but the last are not averaged."""
    idle: tuple[int, ...]
    """Ranks that do not use the last layer."""
    diverges_in: int | None
    """Step in which the first rank's data are not finite."""

    @classmethod
    def of(cls, seed: int, num_ranks: int, *, shards: bool) -> "Program":
        """Returns the program of a seed."""
        chance = random.Random(seed)
        return cls(
            seed=seed,
            shards=shards,
            compression=chance.choice(("int8", "int4")),
            num_ranks=num_ranks,
            bucket_size_mb=chance.choice((None, 0.002, 0.02)),
            widths=tuple(chance.randint(1, 60) for _ in range(chance.randint(2, 4))),
            passes=chance.choice((1, 1, 2)),
            idle=tuple(rank for rank in range(num_ranks) if chance.random() < 0.2),
            diverges_in=chance.choice((None, None, None, 1)),
        )

    def model(self) -> "Layers":
        """Returns the model before training."""
        torch.manual_seed(self.seed)
        return Layers(self.widths)

    def batch(self, rank: int, step: int, number: int) -> Tensor:
        """Returns a rank's data of one pass."""
        generator = torch.Generator().manual_seed(hash((self.seed, rank, step, number)))
        batch = torch.randn(4, self.widths[0], generator=generator)
        if rank == 0 and step == self.diverges_in:
            batch[0, 0] = torch.inf
        return batch


class Layers(nn.Module):
    """Linear layers, of which the last is used on request."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = zip(widths, [*widths[1:], widths[-1]], strict=True)
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairs)

    def forward(self, x: Tensor, uses_last: bool) -> Tensor:
        for number, layer in enumerate(self.layers, start=1):
            if number < len(self.layers) or uses_last:
                x = torch.tanh(layer(x))
        return x


_STEPS = 3


def train(rank: int, _world_size: int, program: Program) -> list[Tensor]:
    """Returns a rank's parameters after training."""
    device = devices.device_of(rank)
    model = program.model().to(device)
    container = ShardedDataParallel if program.shards else BucketedDataParallel
    ddp = container(model, program.bucket_size_mb, compression=program.compression)
    optimizer: torch.optim.Optimizer
    if program.shards:
        optimizer = ShardedOptimizer(ddp.parameters(), torch.optim.SGD, lr=_LEARNING_RATE)
    else:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=_LEARNING_RATE)
    for step in range(_STEPS):
        for number in range(program.passes):
            is_last = number == program.passes - 1
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                batch = program.batch(rank, step, number).to(device)
                ddp(batch, rank not in program.idle).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert devices.hazards() == []
    return [parameter.detach().cpu() for parameter in model.parameters()]


def expected(program: Program) -> list[Tensor]:
    """Returns the parameters after training in one process."""
    model = program.model()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=_LEARNING_RATE)
    cap = None if program.bucket_size_mb is None else program.bucket_size_mb * MIB
    plans = plan_buckets([tensor_spec(parameter) for parameter in parameters], cap)
    averages = [_Average(plan, program) for plan in plans]
    masters = [parameter.detach().clone().requires_grad_() for parameter in parameters]
    optimizer = torch.optim.SGD(masters, lr=_LEARNING_RATE)
    for step in range(_STEPS):
        gradients = [_gradients(program, model, rank, step) for rank in range(program.num_ranks)]
        for average in averages:
            mean = average.of(list(map(average.flat_of, gradients)))
            for slot in average.slots:
                if any(own[slot.tensor] is not None for own in gradients):
                    master = masters[slot.tensor]
                    piece = mean[slot.offset : slot.offset + slot.num_elements]
                    master.grad = torch.from_numpy(piece.copy()).view_as(master)
        optimizer.step()
        optimizer.zero_grad()
        for average in averages:
            average.follow(parameters, masters)
    return [parameter.detach() for parameter in parameters]


def _gradients(program: Program, model: Layers, rank: int, step: int) -> list[Tensor | None]:
    for number in range(program.passes):
        batch = program.batch(rank, step, number)
        model(batch, rank not in program.idle).square().sum().backward()
    scale = 1 / program.num_ranks
    found = [None if each.grad is None else each.grad * scale for each in model.parameters()]
    model.zero_grad()
    return found


class _Average:
    """What the ranks do to one bucket, step by step."""

    def __init__(self, plan: BucketPlan, program: Program) -> None:
        self.slots = plan.slots
        self._shards = program.shards
        self._largest = {"int8": 127, "int4": 7}[program.compression]
        if program.shards:
            borders = list(shard_evenly(plan, program.num_ranks).borders)
        else:
            length = -(-plan.num_elements // (_BLOCK * program.num_ranks)) * _BLOCK
            borders = [
                min(rank * length, plan.num_elements) for rank in range(program.num_ranks + 1)
            ]
        self._pieces = [slice(*pair) for pair in itertools.pairwise(borders)]
        self._length = borders[-1]
        self._left_out = np.zeros((program.num_ranks, self._length), np.float32)
        self._left_back = np.zeros(self._length, np.float32)

    def flat_of(self, tensors: Sequence[Tensor | None]) -> Floats:
        """Returns tensors, one per parameter, as the bucket lays them out."""
        flat = np.zeros(self._length, np.float32)
        for slot in self.slots:
            if (values := tensors[slot.tensor]) is not None:
                flat[slot.offset : slot.offset + slot.num_elements] = values.flatten().numpy()
        return flat

    def of(self, summands: Sequence[Floats]) -> Floats:
        """Returns the sum that the ranks, or its owners, use."""
        total = np.zeros(self._length, np.float32)
        for piece in self._pieces:
            for rank, summand in enumerate(summands):
                sent = _quantised(summand[piece], self._left_out[rank, piece], self._largest)
                total[piece] = sent if rank == 0 else total[piece] + sent
            if not self._shards:
                total[piece] = _quantised(total[piece], self._left_back[piece], 127)
        return total

    @torch.no_grad()
    def follow(self, parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
        """Gives the parameters their new values."""
        if not self._shards:
            for slot in self.slots:
                parameters[slot.tensor].copy_(masters[slot.tensor])
            return
        known, wanted = self.flat_of(parameters), self.flat_of(masters)
        for piece in self._pieces:
            distance = wanted[piece] - known[piece]
            known[piece] += _quantised(distance, np.zeros_like(distance), 127)
        for slot in self.slots:
            piece = known[slot.offset : slot.offset + slot.num_elements]
            parameters[slot.tensor].copy_(torch.from_numpy(piece).view_as(parameters[slot.tensor]))


def _quantised(values: Floats, left: Floats, largest: int) -> Floats:
    """Returns what arrives of values, and puts the rest into `left`."""
    result = np.empty_like(values)
    for begin in range(0, len(values), _BLOCK):
        part = slice(begin, begin + _BLOCK)
        with np.errstate(invalid="ignore"):
            given = values[part] + left[part]
        if not np.isfinite(given).all():
            result[part] = np.nan
            continue
        exact = np.abs(given).max() / np.float32(largest)
        bits = (int(np.float32(exact).view(np.uint32)) + 0xFFFF) // 2**16 * 2**16
        scale = np.uint32(bits).view(np.float32)
        if scale < np.finfo(np.float32).smallest_normal:
            result[part], left[part] = 0, given
            continue
        codes = np.rint(given * (np.float32(1) / scale)).astype(np.float32)
        assert np.abs(codes).max(initial=0) <= largest
        result[part] = codes * scale
        left[part] = given - result[part]
    return result
