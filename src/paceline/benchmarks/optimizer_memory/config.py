"""What to measure of optimizers: strategies one after the other, and the memory of each.

Torch-free, because the command line needs these types to parse its flags.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from paceline.benchmarks.harness.config import (
    DeviceName,
    ModelName,
    PrecisionName,
    ShapeOverrides,
    StrategyChoice,
)
from paceline.benchmarks.step.config import StepCase, StepSweep
from paceline.benchmarks.strategies.config import Variant, require_ranks
from paceline.core.errors import UsageError
from paceline.core.strategies import (
    BUCKET_STRATEGIES,
    DEFAULT_BUCKET_SIZE_MB,
    require_unscaled,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerCase:
    """One model under one strategy."""

    step: StepCase
    variant: Variant


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSweep:
    """Measure what the memory of a step holds, with and without sharding, beside its prediction."""

    strategies: tuple[StrategyChoice, ...] = (
        "torch_ddp",
        "torch_zero_view",
        "sharded_optimizer",
        "sharded",
        "fully_sharded",
        "torch_fsdp2",
    )
    """Strategies to measure, one after the other, so that a rank never holds two models."""
    bucket_size_mb: float = DEFAULT_BUCKET_SIZE_MB
    """Bucket size in MiB for the strategies that have buckets."""
    world_size: int | None = None
    """Ranks to start, by default 2; under torchrun, Slurm or the lab the ranks are there already,
    and this must be left out."""
    model: tuple[ModelName, ...] = ("small",)
    """Presets to measure."""
    batch: int = 4
    """Sequences per rank and step."""
    context: int = 128
    """Context length, in tokens."""
    precision: PrecisionName = "float32"
    """dtype to compute in; bfloat16 and float16 are autocast."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """Recompute each block's activations during backward."""
    warmup: int = 3
    """Steps to run before measuring times, at least one, after those that memory is measured in."""
    steps: int = 10
    """Steps to measure times of."""
    device: DeviceName = "auto"
    """cuda measures NCCL between GPUs, cpu gloo."""
    time_limit_s: float = 300.0
    """Seconds of steps per strategy; what was measured by then, at least one, is the result."""
    timeout_s: float = 300.0
    """Seconds after which a collective that makes no progress is an error."""
    shape: ShapeOverrides = dataclasses.field(default_factory=ShapeOverrides)

    def __post_init__(self) -> None:
        require_ranks(self.world_size, time_limit_s=self.time_limit_s, timeout_s=self.timeout_s)
        if self.warmup < 1:
            raise UsageError("--warmup must be at least 1: it tells how long a step takes")
        if not self.bucket_size_mb > 0:
            raise UsageError("--bucket-size-mb must be positive")
        require_unscaled(self.strategies, self.precision)
        self._steps()

    def _steps(self) -> StepSweep:
        return StepSweep(
            model=self.model,
            context=(self.context,),
            batch=self.batch,
            precision=(self.precision,),
            activation_checkpointing=self.activation_checkpointing,
            warmup=(self.warmup,),
            steps=self.steps,
            device=self.device,
            shape=self.shape,
        )

    def cases(self) -> Iterator[OptimizerCase]:
        """Yields every model with every strategy, models in the outer loop."""
        for step in self._steps().cases():
            for strategy in self.strategies:
                size = self.bucket_size_mb if strategy in BUCKET_STRATEGIES else None
                yield OptimizerCase(
                    step=step, variant=Variant(strategy=strategy, bucket_size_mb=size)
                )
