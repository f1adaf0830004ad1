"""State that a rank keeps from step to step, by name: weights and optimizer state.

Replicated tensors are compared across ranks. A tensor that only one rank has, such as a shard, can
only be compared with its own earlier value.
"""

import dataclasses
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.core.strategies import SHARDED_PARAMETERS, SHARDED_STATE
from paceline.parallel.buckets import local_tensor
from paceline.parallel.zero.optimizer import ShardedOptimizer
from paceline.training.build import Trainee


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
