"""Checks that all ranks have bitwise identical weights and optimizer state.

Usually this costs one read of the state and one all-reduce of two numbers, at any world size. Only
if ranks differ do they exchange more, to find out which rank and which tensor.

Hashes the bits of a tensor in memory, at memory bandwidth.

64-bit words are summed by row, and the row sums are summed with odd multipliers, all modulo 2^64.
A flipped bit changes one word by a power of two, and an odd multiple of that is not zero. Any
single flip, and any number of flips in one word, therefore changes the hash. The hash detects
accidents; it does not resist deliberate collisions.

State that a rank keeps from step to step, by name: weights and optimizer state.

Replicated tensors are compared across ranks. A tensor that only one rank has, such as a shard, can
only be compared with its own earlier value.

Checks that a rank's weights and optimizer state are unchanged since its last update.

Nothing may change them between two updates. A flipped bit therefore identifies its rank, even if
no other rank has a copy.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.strategies import SHARDED_PARAMETERS, SHARDED_STATE
from paceline.parallel.dtensor import local_tensor
from paceline.parallel.ranks.collectives import all_gather_single
from paceline.parallel.zero.optimizer import ShardedOptimizer
from paceline.training.parallelize import Trainee

_WORD_BYTES = 8
_ROW_WORDS = 4096
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""Odd number without structure, as int64: 2^64 divided by the golden ratio."""


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Returns the hash of a tensor's bits as one int64 on its device, without synchronizing."""
    flat = tensor.detach().contiguous().reshape(-1)
    words, rest = _words(flat)
    num_rows = len(words) // _ROW_WORDS
    sums = [rest.to(torch.int64), words[num_rows * _ROW_WORDS :]]
    if num_rows:
        sums.append(words[: num_rows * _ROW_WORDS].view(num_rows, _ROW_WORDS).sum(1))
    return _weighted(torch.cat(sums))


def digests(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the hashes of several tensors."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64, device=device)
    return torch.stack([digest(tensor) for tensor in tensors]).to(device)


def combined(hashes: Tensor) -> Tensor:
    """Combines several hashes into one."""
    return _weighted(hashes)


def _words(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a flat tensor as 64-bit words, and the bytes before and after them.

    Words must be aligned to their size, but views into a flat buffer may not be.
    """
    content = flat.view(torch.uint8)
    before = -content.storage_offset() % _WORD_BYTES
    if len(content) < before + _WORD_BYTES:
        return content.new_empty(0, dtype=torch.int64), content
    end = before + (len(content) - before) // _WORD_BYTES * _WORD_BYTES
    rest = torch.cat([content[:before], content[end:]])
    return content[before:end].view(torch.int64), rest


def _weighted(values: Tensor) -> Tensor:
    multipliers = torch.arange(1, 2 * len(values) + 1, 2, device=values.device) * _GOLDEN
    return (values * multipliers).sum()


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """A weight or optimizer-state tensor of this rank."""

    name: str
    values: Tensor
    is_replicated: bool
    """Whether all ranks hold the same bits."""


def held_tensors(trainee: Trainee) -> list[HeldTensor]:
    """Returns weights, then optimizer state; waits for weights that are in flight."""
    named = dict(trainee.model.named_parameters())
    names: dict[Tensor, str] = {parameter: name for name, parameter in named.items()}
    has_whole_weights = trainee.strategy not in SHARDED_PARAMETERS
    has_whole_state = trainee.strategy not in SHARDED_STATE
    held = [
        HeldTensor(name=name, values=local_tensor(values), is_replicated=has_whole_weights)
        for name, values in named.items()
    ]
    for optimizer in trainee.optimizers.values():
        for owner, state in _state(optimizer).items():
            held += [
                HeldTensor(
                    name=f"{key} of {names.get(owner, 'a parameter')}",
                    values=local_tensor(value),
                    is_replicated=has_whole_state,
                )
                for key, value in state.items()
                if isinstance(value, Tensor)
            ]
    return held


def _state(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """Returns the state of each parameter, also if it belongs to a shard of it."""
    if not isinstance(optimizer, ShardedOptimizer):
        # torch's ZeroRedundancyOptimizer has an inner optimizer of this name.
        return dict(getattr(optimizer, "optim", optimizer).state)
    state = optimizer.state
    found: dict[Tensor, dict[str, Any]] = {}
    for shard in optimizer.shards():
        # A rank has at most one shard of a split parameter, so nothing is overwritten.
        found[shard.parameter] = state.get(shard.tensor, {})
    return found


_MOST_RANKS = 4
"""Maximum number of ranks that a message names."""


def compare_replicas(trainee: Trainee, device: torch.device) -> str | None:
    """Returns which ranks differ from the others, and in which tensor; None if all agree.

    All ranks must call it, and get the same answer.

    Args:
        trainee: The model and its optimizers.
        device: Device to compute on.
    """
    held = [each for each in held_tensors(trainee) if each.is_replicated]
    hashes = digests([each.values for each in held], device)
    total = combined(hashes)
    # All are equal if maximum and minimum are. ~x is -x - 1, which cannot overflow.
    extremes = torch.stack([total, ~total])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    largest, inverse_of_smallest = extremes.tolist()
    if largest == ~inverse_of_smallest:
        return None
    totals = _from_each_rank(total)
    most_held, number = collections.Counter(totals).most_common(1)[0]
    reference = totals.index(most_held)
    theirs = hashes.clone()
    dist.broadcast(theirs, reference)
    differing = (hashes != theirs).nonzero().flatten()
    first = differing[0] if len(differing) else torch.tensor(-1, device=device)
    places = _from_each_rank(first)
    names = [each.name for each in held]
    others = [rank for rank, own in enumerate(totals) if own != most_held]
    if 2 * number > len(totals):
        return "; ".join(
            f"rank {rank} differs from {number} of {len(totals)} ranks, first in "
            f"{names[places[rank]]}"
            for rank in others[:_MOST_RANKS]
        )
    return (
        f"ranks {reference} and {others[0]} differ, first in {names[places[others[0]]]}, and "
        "without a majority it is not known which one is corrupted; set watch.hash_at_rest to "
        "find out"
    )


def _from_each_rank(number: torch.Tensor) -> list[int]:
    gathered = number.new_empty(dist.get_world_size())
    all_gather_single(gathered, number.view(1))
    values: list[int] = gathered.tolist()
    return values


class AtRest:
    """Keeps hashes of this rank's state from one update to the next.

    Args:
        trainee: The model and its optimizers.
        device: Device to compute on.
    """

    def __init__(self, trainee: Trainee, device: torch.device) -> None:
        self._trainee = trainee
        self._device = device
        self._hashes: Tensor | None = None
        self._damaged: str | None = None

    def keep(self) -> None:
        """Hashes this rank's state after an update or a load."""
        self._damaged = None
        self._hashes = digests([each.values for each in held_tensors(self._trainee)], self._device)

    def is_damaged(self) -> bool:
        """Returns whether the state has changed since `keep`."""
        if self._hashes is None:
            return False
        held = held_tensors(self._trainee)
        now = digests([each.values for each in held], self._device)
        differing = (now != self._hashes).nonzero().flatten().tolist()
        if differing:
            self._damaged = held[differing[0]].name
        return bool(differing)

    def explain(self) -> str:
        """Returns the corrupted ranks and tensors, the same on all ranks; all must call it."""
        own = f"rank {dist.get_rank()}: {self._damaged} has changed since the last update"
        reports: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, own if self._damaged else None)
        return "; ".join(report for report in reports if report is not None)
