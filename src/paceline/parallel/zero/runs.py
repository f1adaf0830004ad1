"""Neighbouring shards as one tensor.

An optimizer's step costs Python time per tensor. Under a container all gradients of a flat buffer's
shard lie one behind another, as the shard itself does; so shards that are neighbours and have the
same options go to the optimizer as one tensor (a run), which is right because it treats each
element by itself. Where one of them has no gradient in some step and another has, the run is split
for good: their state differs from then on.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.zero.flat_parameters import FlatParameters, Shard

STEP = "step"
"""State of one number, which a parameter without dimensions cannot tell from its own shape."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """Neighbouring shards that the optimizer updates as one tensor, or a single one."""

    flat: FlatParameters
    shards: Sequence[Shard]
    tensor: nn.Parameter
    """What the optimizer updates: the only shard's own tensor, or all of them."""
    offsets: Sequence[int]
    """Where the shards begin in the local shard of their flat buffer."""

    @property
    def is_one_shard(self) -> bool:
        """Whether the tensor is a shard's own."""
        return self.tensor is self.shards[0].tensor

    @property
    def begin(self) -> int:
        """Where the run begins in the local shard of its flat buffer."""
        return self.offsets[0]

    def state_of(self, shard: Shard, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a shard's part of the run's state."""
        if self.is_one_shard:
            return dict(state)
        piece = self._piece(self.shards.index(shard))
        return {
            key: value[piece] if _is_per_element(key, value, self.tensor) else value
            for key, value in state.items()
        }

    def can_join(self, states: Mapping[Shard, Mapping[str, Any]]) -> bool:
        """Whether what the shards have beside one number per element is the same for all."""
        first = states[self.shards[0]]
        for state in (states[shard] for shard in self.shards[1:]):
            if state.keys() != first.keys():
                return False
            for key, value in state.items():
                is_single = key == STEP or not isinstance(value, Tensor) or value.dim() == 0
                if is_single and _differs(value, first[key]):
                    return False
        return True

    def join_states(self, states: Mapping[Shard, dict[str, Any]]) -> dict[str, Any]:
        """Returns the run's state, made of the shards'."""
        first = self.shards[0]
        joined = dict(states[first])
        if self.is_one_shard:
            return joined
        for key, value in states[first].items():
            if _is_per_element(key, value, first.tensor):
                joined[key] = value.new_zeros(self.tensor.shape)
                for place, shard in enumerate(self.shards):
                    joined[key][self._piece(place)] = states[shard][key]
        return joined

    def _piece(self, place: int) -> slice:
        shard, begin = self.shards[place], self.offsets[place] - self.begin
        return slice(begin, begin + shard.end - shard.start)


def single(flat: FlatParameters, shards: Sequence[Shard]) -> list[Run]:
    """Makes each shard a run."""
    return [Run(flat=flat, shards=[shard], tensor=shard.tensor, offsets=[0]) for shard in shards]


def join_neighbours(flat: FlatParameters, shards: Sequence[Shard]) -> list[Run]:
    """Joins shards between which no other one lies."""
    places = {shard: place for place, shard in enumerate(flat.shards)}
    runs = []
    for _, numbered in itertools.groupby(enumerate(shards), lambda item: places[item[1]] - item[0]):
        joined = [shard for _, shard in numbered]
        if len(joined) == 1:
            runs += single(flat, joined)
            continue
        offsets = [flat.offset_of(shard) for shard in joined]
        end = offsets[-1] + joined[-1].end - joined[-1].start
        tensor = nn.Parameter(flat.master[offsets[0] : end])
        runs.append(Run(flat=flat, shards=joined, tensor=tensor, offsets=offsets))
    return runs


def _is_per_element(key: str, value: Any, tensor: Tensor) -> bool:
    return isinstance(value, Tensor) and key != STEP and value.shape == tensor.shape


def _differs(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return not torch.equal(value, other)
    return bool(value != other)
