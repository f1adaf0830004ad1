"""The inner optimizer of flat parameters: it updates this rank's shards of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.errors import UsageError
from paceline.parallel.partition import Partition
from paceline.parallel.reducer.settings import GroupReference
from paceline.parallel.zero.flat_parameters import FlatParameters, Shard, flat_elements
from paceline.parallel.zero.registry import ShardedParameters

MakeOptimizer: TypeAlias = Callable[[list[dict[str, Any]]], Optimizer]

MASTER = "master"
"""Under this name a shard's own value is saved, where it is more precise than the parameter."""

NOT_OPTIONS = ("params", "param_names")
"""What a group has beside its options."""


class ShardOptimizer:
    """Steps this rank's shards of flat parameters, and sends them.

    Args:
        flat: Parameters, and this rank's shards of them.
        group: The ranks that hold the shards.
        outer_groups: Groups of whole parameters; the shards take their options from them.
        make: Makes an optimizer of groups of shards.
        container: Who reduce-scatters the gradients; None if all ranks have all of them.
    """

    def __init__(
        self,
        flat: FlatParameters,
        group: GroupReference,
        outer_groups: Sequence[dict[str, Any]],
        make: MakeOptimizer,
        container: ShardedParameters | None = None,
    ) -> None:
        self.flat = flat
        self.group = group
        self._make = make
        self.shards: list[Shard] = []
        """What this rank's optimizer updates."""
        self.inner: Optimizer | None = None
        """None where this rank has no shard."""
        self._outer_groups: list[dict[str, Any]] = []
        self._given: list[dict[str, Any]] = []
        """The options that the inner groups were last given."""
        self.extend(outer_groups)
        self.is_awaited_elsewhere = container is not None
        """Whether the next forward pass waits for what is sent, instead of the step itself."""
        self.steps_in_backward = container is not None and container.steps_in_backward

    def extend(self, outer_groups: Sequence[dict[str, Any]]) -> None:
        """Takes in the shards of further groups."""
        groups = []
        for outer in outer_groups:
            chosen = set(outer["params"])
            shards = [shard for shard in self.flat.shards if shard.parameter in chosen]
            if shards:
                self.shards += shards
                self._outer_groups.append(outer)
                self._given.append(_options(outer))
                groups.append({**_options(outer), "params": [shard.tensor for shard in shards]})
        if self.inner is None and groups:
            self.inner = self._make(groups)
        elif self.inner is not None:
            for group in groups:
                self.inner.add_param_group(group)

    def step(self, **keywords: Any) -> None:
        """Updates this rank's shards, and starts to send them."""
        if not any(parameter.requires_grad for parameter in self.flat.parameters):
            return  # All are frozen, on all ranks, and nothing has changed.
        self.flat.wait()
        self.flat.require_in_place()
        if self.inner is not None:
            self._pass_on_options(self.inner)
            if self._cuts_gradients:
                for shard in self.shards:
                    shard.tensor.grad = self._cut_gradient(shard)
            self.inner.step(**keywords)
            if self._cuts_gradients:
                self.drop_gradients()
        self.flat.publish(self.group.get())

    def _pass_on_options(self, inner: Optimizer) -> None:
        """Gives the inner groups what has changed in the outer ones, as schedulers change them.

        No more than that: an optimizer may keep counts of its own among its options.
        """
        groups = zip(self._outer_groups, inner.param_groups, self._given, strict=True)
        for outer, inner_group, given in groups:
            for name, value in _options(outer).items():
                if name not in given or _differs(value, given[name]):
                    inner_group[name] = given[name] = value

    @property
    def _cuts_gradients(self) -> bool:
        """Whether shards' gradients are cut from whole ones, which all ranks have."""
        return not self.is_awaited_elsewhere and self.flat.partition is Partition.ELEMENTS

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
        if self.flat.has_master:
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


def _differs(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return value is not other  # One that is changed in place is the inner group's as well.
    return bool(value != other)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in NOT_OPTIONS}
