"""Checksums of weights and optimizer state: equal on all ranks, unchanged since the last update.

Replicated tensors are compared across ranks. Usually this costs one read of the state and one
all-reduce of two numbers, at any world size; only if ranks differ do they exchange more, to find
out which rank and which tensor. A tensor that only one rank has, such as a shard, can only be
compared with its own earlier value: nothing may change it between two updates, so that a flipped
bit identifies its rank even if no other rank has a copy.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core.strategies import SHARDED_PARAMETERS, SHARDED_STATE, StrategyName
from paceline.parallel.digest import combined, digests
from paceline.parallel.dtensor import local_tensor
from paceline.parallel.ranks.collectives import all_gather_single
from paceline.parallel.zero.optimizer import ShardedOptimizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateTensor:
    """A weight or optimizer-state tensor of this rank."""

    name: str
    values: Tensor
    is_replicated: bool
    """Whether all ranks have the same bits."""


def state_tensors(
    model: nn.Module, optimizers: Iterable[Optimizer], strategy: StrategyName
) -> list[StateTensor]:
    """Returns weights, then optimizer state; waits for weights that are in flight.

    The strategy says which tensors all ranks have whole.
    """
    named = dict(model.named_parameters())
    names: dict[Tensor, str] = {parameter: name for name, parameter in named.items()}
    found = [
        StateTensor(
            name=name, values=local_tensor(values), is_replicated=strategy not in SHARDED_PARAMETERS
        )
        for name, values in named.items()
    ]
    for optimizer in optimizers:
        for owner, state in _state_by_parameter(optimizer).items():
            found += [
                StateTensor(
                    name=f"{key} of {names.get(owner, 'a parameter')}",
                    values=local_tensor(value),
                    is_replicated=strategy not in SHARDED_STATE,
                )
                for key, value in state.items()
                if isinstance(value, Tensor)
            ]
    return found


def _state_by_parameter(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """Returns the state of each parameter, also if it belongs to a shard of it."""
    if not isinstance(optimizer, ShardedOptimizer):
        # torch's ZeroRedundancyOptimizer has an inner optimizer of this name.
        return dict(getattr(optimizer, "optim", optimizer).state)
    state = optimizer.state
    # A rank has at most one shard of a split parameter, so nothing is overwritten.
    return {shard.parameter: state.get(shard.tensor, {}) for shard in optimizer.shards()}


_MOST_RANKS = 4
"""Maximum number of ranks that a message names."""


def compare_replicas(
    tensors: Iterable[StateTensor], device: torch.device, group: dist.ProcessGroup | None = None
) -> str | None:
    """Returns which ranks differ from the others, and in which tensor; None if all agree.

    All ranks of the group, by default all, must call it, and get the same answer.
    """
    replicated = [each for each in tensors if each.is_replicated]
    hashes = digests([each.values for each in replicated], device)
    total = combined(hashes)
    # All are equal if maximum and minimum are. ~x is -x - 1, which cannot overflow.
    extremes = torch.stack([total, ~total])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    largest, inverse_of_smallest = extremes.tolist()
    if largest == ~inverse_of_smallest:
        return None
    totals = _from_each_rank(total, group)
    ranks = dist.get_process_group_ranks(group)
    most_common, number = collections.Counter(totals).most_common(1)[0]
    reference = totals.index(most_common)
    theirs = hashes.clone()
    dist.broadcast(theirs, group=group, group_src=reference)
    differing = (hashes != theirs).nonzero().flatten()
    first = differing[0] if len(differing) else torch.tensor(-1, device=device)
    names = [replicated[index].name for index in _from_each_rank(first, group)]
    others = [rank for rank, own in enumerate(totals) if own != most_common]
    if 2 * number > len(totals):
        return "; ".join(
            f"rank {ranks[rank]} differs from {number} of {len(totals)} ranks, first in "
            f"{names[rank]}"
            for rank in others[:_MOST_RANKS]
        )
    return (
        f"ranks {ranks[reference]} and {ranks[others[0]]} differ, first in {names[others[0]]}, and "
        "without a majority it is not known which one is corrupted; set watch.hash_at_rest to "
        "find out"
    )


def _from_each_rank(number: Tensor, group: dist.ProcessGroup | None) -> list[int]:
    gathered = number.new_empty(dist.get_world_size(group))
    all_gather_single(gathered, number.view(1), group=group)
    values: list[int] = gathered.tolist()
    return values


class StateChecksum:
    """Checksum of this rank's state, which `tensors` returns, kept from one update to the next."""

    def __init__(self, tensors: Callable[[], list[StateTensor]], device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self._hashes: Tensor | None = None
        self._damaged: str | None = None

    def update(self) -> None:
        """Takes the checksum of this rank's state, after an update or a load."""
        self._damaged = None
        self._hashes = digests([each.values for each in self._tensors()], self._device)

    def is_damaged(self) -> bool:
        """Returns whether the state has changed since the last `update`."""
        if self._hashes is None:
            return False
        tensors = self._tensors()
        now = digests([each.values for each in tensors], self._device)
        differing = (now != self._hashes).nonzero().flatten().tolist()
        if differing:
            self._damaged = tensors[differing[0]].name
        return bool(differing)

    def explain(self) -> str:
        """Returns the corrupted ranks and tensors, the same on all ranks; all must call it."""
        own = f"rank {dist.get_rank()}: {self._damaged} has changed since the last update"
        reports: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, own if self._damaged else None)
        return "; ".join(report for report in reports if report is not None)
