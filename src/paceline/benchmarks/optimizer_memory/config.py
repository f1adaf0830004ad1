"""Configuration of optimizer memory benchmarks. Free of torch, for use by the command line."""

import dataclasses
from collections.abc import Iterator

from paceline.benchmarks.harness.config import StrategyChoice, require_counts
from paceline.benchmarks.step.config import StepCase
from paceline.benchmarks.strategies.config import StrategySweep, Variant
from paceline.core.errors import UsageError
from paceline.core.strategies import BUCKET_STRATEGIES, DEFAULT_BUCKET_SIZE_MB


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerCase:
    """One model under one strategy."""

    step: StepCase
    variant: Variant


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSweep(StrategySweep):
    """Measure the memory of a step with and without sharding, next to its prediction."""

    strategies: tuple[StrategyChoice, ...] = (
        "torch_ddp",
        "torch_zero_view",
        "sharded_optimizer",
        "sharded",
        "fully_sharded",
        "torch_fsdp2",
    )
    """Strategies to measure, one after the other; a rank never holds two models."""
    bucket_size_mb: float = DEFAULT_BUCKET_SIZE_MB
    """Bucket size in MiB, for the strategies that have buckets."""
    warmup: int = 3
    """Warm-up steps between measuring memory and measuring times, at least one."""
    steps: int = 10
    """Steps whose times are measured."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(warmup=(), steps=self.steps)
        if self.warmup < 1:
            raise UsageError("--warmup must be at least 1, to estimate the step time")
        if not self.bucket_size_mb > 0:
            raise UsageError("--bucket-size-mb must be positive")

    def cases(self) -> Iterator[OptimizerCase]:
        """Yields every model with every strategy, models in the outer loop."""
        for step in self.step_sweep(warmup=self.warmup, steps=self.steps).cases():
            for strategy in self.strategies:
                size = self.bucket_size_mb if strategy in BUCKET_STRATEGIES else None
                variant = Variant(strategy=strategy, bucket_size_mb=size)
                yield OptimizerCase(step=step, variant=variant)
