"""Configuration of strategy benchmarks. Free of torch, because the command line imports it."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from paceline.benchmarks.harness.config import (
    ModelName,
    PrecisionName,
    RankSweep,
    ShapeOverrides,
    StrategyChoice,
    require_counts,
)
from paceline.benchmarks.step.config import StepCase, StepSweep
from paceline.core.errors import UsageError
from paceline.core.strategies import (
    BUCKET_STRATEGIES,
    DEFAULT_BUCKET_SIZE_MB,
    BucketSize,
    StrategyName,
    require_unscaled,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One of the strategies to compare."""

    strategy: StrategyName
    bucket_size_mb: BucketSize | None
    """Bucket size in MiB; None for strategies without buckets."""

    @property
    def label(self) -> str:
        """A short name of the variant."""
        size = self.bucket_size_mb
        if size is None:
            return self.strategy
        return f"{self.strategy} auto" if size == "auto" else f"{self.strategy} {size:g} MiB"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataParallelCase:
    """One model under several strategies."""

    step: StepCase
    variants: tuple[Variant, ...]


AUTO_WARMUP = 5
"""Rounds until an automatic bucket size is in use: one warm-up, three observed, one to switch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategySweep(RankSweep):
    """Options of every measurement of strategies."""

    strategies: tuple[StrategyChoice, ...] = ("torch_ddp", "bucketed")
    """Data-parallel strategies to compare; ratios are relative to the first one."""
    model: tuple[ModelName, ...] = ("small",)
    """Model presets to measure."""
    batch: int = 4
    """Sequences per rank and step."""
    context: int = 128
    """Context length, in tokens."""
    precision: PrecisionName = "float32"
    """dtype to compute in; bfloat16 and float16 are autocast."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """full recomputes each block's activations during backward."""
    shape: ShapeOverrides = dataclasses.field(default_factory=ShapeOverrides)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_unscaled(self.strategies, self.precision)

    def step_sweep(self, *, warmup: int, steps: int) -> StepSweep:
        """Returns the sweep of steps to measure under every strategy."""
        return StepSweep(
            model=self.model,
            context=(self.context,),
            batch=self.batch,
            precision=(self.precision,),
            activation_checkpointing=self.activation_checkpointing,
            warmup=(warmup,),
            steps=steps,
            device=self.device,
            shape=self.shape,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataParallelSweep(StrategySweep):
    """Time training steps under several data-parallel strategies, interleaved on the same ranks."""

    bucket_size_mb: tuple[BucketSize, ...] = (DEFAULT_BUCKET_SIZE_MB,)
    """Bucket sizes in MiB, for the strategies that have buckets; auto is only for bucketed."""
    compile: bool = False
    """Compile the whole model with torch.compile."""
    compile_blocks: bool = False
    """Compile each block separately with torch.compile."""
    warmup: int = 5
    """Warm-up rounds before measuring; auto needs at least five."""
    rounds: int = 20
    """Rounds to measure; a round is one step of every strategy."""
    time_limit_s: float = 900.0
    """Seconds of rounds per model; the rounds until then, at least one, are the result."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(warmup=(self.warmup,), steps=self.rounds, name="--rounds")
        if "auto" in self.bucket_size_mb and self.warmup < AUTO_WARMUP:
            raise UsageError(f"--warmup must be at least {AUTO_WARMUP} with --bucket-size-mb auto")
        if min((size for size in self.bucket_size_mb if size != "auto"), default=1) <= 0:
            raise UsageError("--bucket-size-mb must be positive, or auto")

    @property
    def num_rounds(self) -> int:
        """Warm-up and measured rounds together."""
        return self.warmup + self.rounds

    def variants(self) -> Iterator[Variant]:
        """Yields every strategy with every bucket size that applies to it."""
        for strategy in self.strategies:
            has_buckets = strategy in BUCKET_STRATEGIES
            for size in self.bucket_size_mb if has_buckets else (None,):
                if size != "auto" or strategy == "bucketed":
                    yield Variant(strategy=strategy, bucket_size_mb=size)

    def cases(self) -> Iterator[DataParallelCase]:
        """Yields one case per model, with all strategies."""
        variants = tuple(self.variants())
        steps = dataclasses.replace(
            self.step_sweep(warmup=self.warmup, steps=self.rounds),
            compile=self.compile,
            compile_blocks=self.compile_blocks,
        )
        for step in steps.cases() if variants else ():
            yield DataParallelCase(step=step, variants=variants)
