"""A model and its optimizers as the state of a checkpoint, whatever strategy trains them."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer

from paceline.training.checkpoint.restore import Source
from paceline.training.checkpoint.state.optimizer import load_optimizer_state, optimizer_state

MODEL = "model"
"""Under which name a checkpoint holds the tensors of the model."""
_OPTIMIZER = "optimizer"


def training_state(
    model: nn.Module, optimizers: Mapping[str, Optimizer], stages: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Returns what this rank has to save; all ranks call it.

    Args:
        model: Plain, or wrapped by any strategy.
        optimizers: By the names that they are to have in the checkpoint.
        stages: The ranks that have the other parameters, where a pipeline divides them.
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
    """Gives a model and its optimizers the values of a checkpoint; all ranks call it.

    Args:
        source: Whatever world size and strategy has saved it.
        model: Plain, or wrapped by any strategy.
        optimizers: By the names that they have in the checkpoint.
        stages: The ranks that have the other parameters, where a pipeline divides them.
    """
    state = {MODEL: get_model_state_dict(model)}
    source.load(state)
    set_model_state_dict(model, state[MODEL])
    # After the parameters: a sharded optimizer may keep a copy of them.
    for name, optimizer in optimizers.items():
        load_optimizer_state(optimizer, model, source, f"{_OPTIMIZER}.{name}", stages)
