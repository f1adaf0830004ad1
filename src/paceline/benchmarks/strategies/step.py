"""A training step under a strategy, and its case fields in a record."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.benchmarks.harness.devices import resolve_device
from paceline.benchmarks.harness.ranks import MeasuringRanks
from paceline.benchmarks.step.config import StepCase
from paceline.benchmarks.step.training_step import LEARNING_RATE, TrainingStep, step_case_fields
from paceline.benchmarks.strategies.config import Variant
from paceline.parallel.buckets import local_tensor
from paceline.parallel.ranks.hardware import describe_hardware
from paceline.parallel.strategies import apply_strategy, make_optimizer
from paceline.parallel.zero.optimizer import ShardedOptimizer, state_tensors
from paceline.records import CaseValue


class StrategyStep(TrainingStep):
    """A step on one of several ranks; its tensors are this rank's parts."""

    def __init__(self, case: StepCase, variant: Variant, device: torch.device) -> None:
        self.strategy = variant.strategy
        super().__init__(
            case,
            device,
            wrap=lambda module: self.wrap(module, variant),
            data_seed=dist.get_rank() + 1,
            make_optimizer=lambda model: make_optimizer(
                variant.strategy, model, torch.optim.AdamW, lr=LEARNING_RATE, fused=True
            ),
        )

    def wrap(self, module: nn.Module, variant: Variant) -> nn.Module:
        """Applies the strategy to the model."""
        return apply_strategy(variant.strategy, module, variant.bucket_size_mb)

    def parameters(self) -> list[Tensor]:
        """Returns the parameters that this rank holds."""
        return [local_tensor(parameter) for parameter in super().parameters()]

    def gradients(self) -> list[Tensor]:
        """Returns the gradients that this rank holds now."""
        gradients = super().gradients()
        if isinstance(self.optimizer, ShardedOptimizer):
            gradients += self.optimizer.gradient_tensors()
        return [local_tensor(gradient) for gradient in gradients]

    def optimizer_state(self) -> list[Tensor]:
        """Returns the tensors that this rank's optimizer keeps from step to step."""
        return state_tensors(self.optimizer)


def strategy_case_fields(
    case: StepCase, variant: Variant, ranks: MeasuringRanks
) -> dict[str, CaseValue]:
    """Returns the case fields of the record of a step under a strategy."""
    step = step_case_fields(case, describe_hardware(resolve_device(case.device)))
    del step["phase"]
    return {
        "strategy": variant.strategy,
        "bucket_size_mb": variant.bucket_size_mb,
        **step,
        **ranks.topology,
        "optimizer": "adamw-fused",
    }
