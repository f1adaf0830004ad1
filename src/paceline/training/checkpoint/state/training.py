"""Checkpoint state of a model and its optimizers, independent of the strategy."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer

from paceline.training.checkpoint.restore import Source
from paceline.training.checkpoint.state.optimizer import load_optimizer_state, optimizer_state

MODEL = "model"
"""Key of the model's tensors in a checkpoint."""
_OPTIMIZER = "optimizer"


def training_state(
    model: nn.Module, optimizers: Mapping[str, Optimizer], stages: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Returns the state that this rank saves; all ranks must call it.

    Args:
        model: Plain, or wrapped by any strategy.
        optimizers: Optimizers by their names in the checkpoint.
        stages: Process group of the ranks with the other parameters, if a pipeline splits them.
    """
    return {
        MODEL: get_model_state_dict(model),
        _OPTIMIZER: {
            name: optimizer_state(optimizer, model, stages)
            for name, optimizer in optimizers.items()
        },
    }


def load_training_state(
    source: Source,
    model: nn.Module,
    optimizers: Mapping[str, Optimizer],
    stages: dist.ProcessGroup | None = None,
) -> None:
    """Loads a model and its optimizers from a checkpoint; all ranks must call it.

    Args:
        source: The checkpoint, saved with any world size and strategy.
        model: Plain, or wrapped by any strategy.
        optimizers: Optimizers by their names in the checkpoint.
        stages: Process group of the ranks with the other parameters, if a pipeline splits them.
    """
    state = {MODEL: get_model_state_dict(model)}
    source.load(state)
    set_model_state_dict(model, state[MODEL])
    # After the parameters: a sharded optimizer may keep a copy of them.
    for name, optimizer in optimizers.items():
        load_optimizer_state(optimizer, model, source, f"{_OPTIMIZER}.{name}", stages)
