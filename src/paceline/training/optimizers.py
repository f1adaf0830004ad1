"""Optimizers of a run: which parameters are decayed, which ones Muon trains, and the learning rate.

The schedule is a pure function from step number to a factor of the peak learning rate.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core.errors import UsageError
from paceline.core.strategies import SHARDED_STATE, StrategyName
from paceline.parallel.strategies import make_optimizer
from paceline.training.config import OptimizerConfig, ScheduleConfig

PEAK = "peak_learning_rate"
"""Key of a parameter group's peak learning rate, which the schedule scales."""


def make_optimizers(
    config: OptimizerConfig,
    strategy: StrategyName,
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Optimizer]:
    """Creates AdamW for all parameters, or Muon for the matrices of blocks and AdamW for the rest.

    The keys are the names of the optimizers in checkpoints. The group is that over which the
    strategy has wrapped the model.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if config.name == "adamw":
        return {"adamw": _adamw(config, strategy, model, named, group)}
    if strategy in SHARDED_STATE:
        raise UsageError(
            f"optimizer.name muon needs whole matrices on each rank, but {strategy} shards them; "
            "use parallel.strategy ddp, or optimizer.name adamw"
        )
    matrices = [(name, p) for name, p in named if p.ndim == 2 and ".blocks." in f".{name}"]
    chosen = {name for name, _ in matrices}
    rest = [(name, p) for name, p in named if name not in chosen]
    muon = torch.optim.Muon(
        [{"params": [p for _, p in matrices], PEAK: config.muon_learning_rate}],
        lr=config.muon_learning_rate,
        weight_decay=config.weight_decay,
    )
    return {"muon": muon, "adamw": _adamw(config, strategy, model, rest, group)}


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
    group: dist.ProcessGroup | None,
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
        groups=[{**each, PEAK: config.learning_rate} for each in groups if each["params"]],
        process_group=group,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def learning_rate_factor(schedule: ScheduleConfig, step: int, num_steps: int) -> float:
    """Returns the learning-rate factor of a step.

    Steps count from 0. Warm-up rises linearly and reaches the peak at its last step. A decay ends
    at the last step of the run, with the schedule's final fraction.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.name == "constant":
        return 1.0
    decay_steps = num_steps - schedule.warmup_steps
    if schedule.name == "wsd":
        decay_steps = min(decay_steps, math.ceil(schedule.decay_fraction * num_steps))
    num_left = num_steps - 1 - step
    if num_left >= decay_steps:
        return 1.0
    is_left = num_left / max(1, decay_steps)
    if schedule.name == "cosine":
        is_left = (1 - math.cos(math.pi * is_left)) / 2
    return schedule.final_fraction + (1 - schedule.final_fraction) * is_left
