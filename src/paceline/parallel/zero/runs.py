"""Runs: neighbouring shards that the optimizer sees as one tensor.

An optimizer's step costs Python time per tensor. Under a container, the gradients of a flat
buffer's shard are contiguous, as is the shard itself. Neighbouring shards with the same options are
therefore passed to the optimizer as one tensor (a run), which is correct because the optimizer is
elementwise. If in some step only part of a run's shards have a gradient, the run is permanently
split, because the states of its shards differ from then on.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.zero.flat_parameters import FlatParameters, Shard

STEP = "step"
"""Key of the step count, a scalar: it has the shape of a zero-dimensional parameter's state."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """Neighbouring shards that the optimizer updates as one tensor, or a single shard."""

    flat: FlatParameters
    shards: Sequence[Shard]
    tensor: nn.Parameter
    """The tensor that the optimizer updates: the single shard's own, or one that spans all."""
    offsets: Sequence[int]
    """Start of each shard in the local shard of the flat buffer."""

    @property
    def is_one_shard(self) -> bool:
        """Whether the run consists of a single shard."""
        return self.tensor is self.shards[0].tensor

    @property
    def begin(self) -> int:
        """Start of the run in the local shard of its flat buffer."""
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
        """Returns whether all shards have equal state apart from per-element state."""
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
        """Returns the run's state, joined from the shards' states."""
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
    """Returns one run per shard."""
    return [Run(flat=flat, shards=[shard], tensor=shard.tensor, offsets=[0]) for shard in shards]


def join_neighbours(flat: FlatParameters, shards: Sequence[Shard]) -> list[Run]:
    """Returns runs of shards that are adjacent in the flat buffer."""
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
