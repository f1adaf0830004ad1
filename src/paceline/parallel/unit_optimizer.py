"""The inner optimizer of one unit: it updates what this rank owns of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core.errors import UsageError
from paceline.parallel.settings import GroupReference
from paceline.parallel.shard_unit import Shard, ShardUnit, flat_elements
from paceline.parallel.sharded_parameters import ShardedParameters
from paceline.parallel.shards import Partition

MakeOptimizer: TypeAlias = Callable[[list[dict[str, Any]]], Optimizer]

MASTER = "master"
"""Under this name a shard's own value is saved, where it is more precise than the parameter."""

NOT_OPTIONS = ("params", "param_names")
"""What a group has beside its options."""


class UnitOptimizer:
    """Steps a unit's shards on this rank, and sends them.

    Args:
        unit: Parameters, and what this rank owns of them.
        group: The ranks that share it.
        outer_groups: Groups of whole parameters; the shards take their options from them.
        make: Makes an optimizer of groups of shards.
        container: Who reduces the unit's gradients to their owners; None if all ranks have them.
    """

    def __init__(
        self,
        unit: ShardUnit,
        group: GroupReference,
        outer_groups: Sequence[dict[str, Any]],
        make: MakeOptimizer,
        container: ShardedParameters | None = None,
    ) -> None:
        self.unit = unit
        self._group = group
        group_numbers = {
            parameter: number
            for number, outer in enumerate(outer_groups)
            for parameter in outer["params"]
        }
        self.shards = [shard for shard in unit.shards if shard.parameter in group_numbers]
        tensors: dict[int, list[nn.Parameter]] = {}
        for shard in self.shards:
            tensors.setdefault(group_numbers[shard.parameter], []).append(shard.tensor)
        self._outer_groups = [outer_groups[number] for number in tensors]
        self.inner: Optimizer | None = None
        """None where this rank owns nothing of the unit."""
        if tensors:
            self.inner = make(
                [
                    {**_options(outer), "params": own}
                    for outer, own in zip(self._outer_groups, tensors.values(), strict=True)
                ]
            )
        self.is_awaited_elsewhere = container is not None
        """Whether the next forward pass waits for what is sent, instead of the step itself."""
        self.steps_in_backward = container is not None and container.steps_in_backward

    def step(self, **keywords: Any) -> None:
        """Updates this rank's shards, and starts to send them."""
        self.unit.wait()
        self.unit.require_in_place()
        if self.inner is not None:
            for outer, inner in zip(self._outer_groups, self.inner.param_groups, strict=True):
                inner.update(_options(outer))
            if self._cuts_gradients:
                for shard in self.shards:
                    shard.tensor.grad = self._cut_gradient(shard)
            self.inner.step(**keywords)
            if self._cuts_gradients:
                self.drop_gradients()
        self.unit.publish(self._group.get())

    @property
    def _cuts_gradients(self) -> bool:
        """Whether shards' gradients are cut from whole ones, which all ranks have."""
        return not self.is_awaited_elsewhere and self.unit.partition is Partition.ELEMENTS

    def _cut_gradient(self, shard: Shard) -> Tensor | None:
        gradient = shard.parameter.grad
        if gradient is None:
            return None
        if gradient.layout != torch.strided:
            raise UsageError(
                f"a parameter of shape {tuple(gradient.shape)} has a {gradient.layout} gradient, "
                'which cannot be cut; use partition="parameters", or make its layer with '
                "sparse=False"
            )
        return flat_elements(shard.parameter, gradient)[shard.start : shard.end]

    def state_of(self, shard: Shard) -> dict[str, Any]:
        """Returns a shard's state, with its own value where that is more precise."""
        assert self.inner is not None
        state = dict(self.inner.state.get(shard.tensor, {}))
        if self.unit.has_master:
            state[MASTER] = shard.tensor.detach()
        return state

    def load_state(self, states: Mapping[Shard, dict[str, Any]]) -> None:
        """Gives each shard its state, on its device and in its dtype as torch decides."""
        if self.inner is None:
            return
        by_tensor = {shard.tensor: state for shard, state in states.items()}
        tensors = [tensor for group in self.inner.param_groups for tensor in group["params"]]
        numbered = {
            number: by_tensor[tensor] for number, tensor in enumerate(tensors) if by_tensor[tensor]
        }
        groups = self.inner.state_dict()["param_groups"]
        self.inner.load_state_dict({"state": numbered, "param_groups": groups})

    def drop_gradients(self) -> None:
        """Forgets the shards' gradients."""
        for shard in self.shards:
            shard.tensor.grad = None


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in NOT_OPTIONS}
