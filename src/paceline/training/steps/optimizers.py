"""Optimizers of a run: which parameters are decayed, and which ones Muon trains."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core.errors import UsageError
from paceline.core.strategies import SHARDED_STATE, StrategyName
from paceline.parallel.strategies import make_optimizer
from paceline.training.config import OptimizerConfig

PEAK = "peak_learning_rate"
"""Key of a parameter group's peak learning rate, which the schedule scales."""


def make_optimizers(
    config: OptimizerConfig, strategy: StrategyName, model: nn.Module
) -> dict[str, Optimizer]:
    """Creates AdamW for all parameters, or Muon for the matrices of blocks and AdamW for the rest.

    The keys are the names of the optimizers in checkpoints.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if config.name == "adamw":
        return {"adamw": _adamw(config, strategy, model, named)}
    if strategy in SHARDED_STATE:
        raise UsageError(
            f"optimizer.name muon needs whole matrices on each rank, but {strategy} shards them; "
            "use parallel.strategy bucketed, or optimizer.name adamw"
        )
    matrices = [(name, p) for name, p in named if p.ndim == 2 and ".blocks." in f".{name}"]
    chosen = {name for name, _ in matrices}
    rest = [(name, p) for name, p in named if name not in chosen]
    muon = torch.optim.Muon(
        [{"params": [p for _, p in matrices], PEAK: config.muon_learning_rate}],
        lr=config.muon_learning_rate,
        weight_decay=config.weight_decay,
    )
    return {"muon": muon, "adamw": _adamw(config, strategy, model, rest)}


def set_learning_rate(optimizers: Iterable[Optimizer], factor: float) -> None:
    """Sets the learning rate of every parameter group to its peak times a factor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group[PEAK] * factor


def _adamw(
    config: OptimizerConfig,
    strategy: StrategyName,
    model: nn.Module,
    named: Sequence[tuple[str, Tensor]],
) -> Optimizer:
    # Only matrices are decayed: norms and biases must keep their scale.
    groups: list[dict[str, Any]] = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return make_optimizer(
        strategy,
        model,
        torch.optim.AdamW,
        groups=[{**group, PEAK: config.learning_rate} for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )
