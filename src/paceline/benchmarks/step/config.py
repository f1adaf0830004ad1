"""Configuration of step benchmarks on one rank. Free of torch, for use by the command line."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal

from paceline.benchmarks.harness.config import (
    Compilation,
    DeviceName,
    ModelName,
    PrecisionName,
    RunLimits,
    ShapeOverrides,
    TimedCase,
    require_counts,
)
from paceline.core.errors import UsageError
from paceline.core.specs import (
    AttentionImplementation,
    BatchShape,
    ModelShape,
    Phase,
    require_buildable,
    require_context,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCase(TimedCase):
    """One training step to measure."""

    model: str
    shape: ModelShape
    batch: BatchShape
    phase: Phase
    precision: PrecisionName
    compilation: Compilation
    activation_checkpointing: Literal["none", "full"]
    attention: AttentionImplementation


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSweep:
    """Time forward, backward and optimizer of a language model, and measure its peak memory."""

    model: tuple[ModelName, ...] = ("small",)
    """Model presets to measure."""
    context: tuple[int, ...] = (128,)
    """Context lengths, in tokens."""
    batch: int = 4
    """Sequences per step."""
    phase: tuple[Phase, ...] = ("train",)
    """Parts of a step to run; train includes AdamW."""
    precision: tuple[PrecisionName, ...] = ("float32",)
    """dtypes to compute in; bfloat16 and float16 are autocast."""
    compile: bool = False
    """Compile the whole model with torch.compile."""
    compile_blocks: bool = False
    """Compile each block separately with torch.compile."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """full recomputes each block's activations during backward."""
    attention: AttentionImplementation = "auto"
    """Attention implementation: auto uses Triton on CUDA and torch's fused kernel elsewhere; naive
    stores all attention scores."""
    warmup: tuple[int, ...] = (5,)
    """Numbers of warm-up steps before measuring."""
    steps: int = 10
    """Steps to measure."""
    device: DeviceName = "auto"
    """Device to run on."""
    shape: ShapeOverrides = dataclasses.field(default_factory=ShapeOverrides)
    limits: RunLimits = dataclasses.field(default_factory=RunLimits)

    def __post_init__(self) -> None:
        require_counts(warmup=self.warmup, steps=self.steps)
        if self.compile and self.compile_blocks:
            raise UsageError("--compile and --compile-blocks exclude each other; leave one out")

    def cases(self) -> Iterator[StepCase]:
        """Yields every combination, models in the outer loop."""
        compilation: Compilation = "whole" if self.compile else "none"
        if self.compile_blocks:
            compilation = "blocks"
        for name, context, phase, precision, warmup in itertools.product(
            self.model, self.context, self.phase, self.precision, self.warmup
        ):
            label, shape = self.shape.apply(name)
            require_buildable(shape)
            require_context(name, shape, context)
            yield StepCase(
                model=label,
                shape=shape,
                batch=BatchShape(num_sequences=self.batch, context_length=context),
                phase=phase,
                precision=precision,
                compilation=compilation,
                activation_checkpointing=self.activation_checkpointing,
                attention=self.attention,
                device=self.device,
                warmup=warmup,
                steps=self.steps,
                time_limit_s=self.limits.time_limit_s,
            )
