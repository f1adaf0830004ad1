"""What to measure: sweeps as the command line gives them, and the cases they expand to.

Torch-free, because the command line needs these types to parse its flags.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal

from paceline.core.errors import UsageError
from paceline.core.operations import Operation
from paceline.core.presets import model_preset
from paceline.core.specs import (
    AttentionImplementation,
    BatchShape,
    ModelShape,
    Phase,
    require_buildable,
    require_context,
)
from paceline.core.units import parse_bytes

DeviceName = Literal["auto", "cpu", "cuda"]
PrecisionName = Literal["float32", "bfloat16", "float16"]
Compilation = Literal["none", "blocks", "whole"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunLimits:
    """What one case may use."""

    memory_limit_gib: float | None = None
    """Memory that one case may take, in GiB; by default most of what is free. On CUDA it only
    decides what is skipped: the device itself says when it is full."""
    time_limit_s: float = 300.0
    """Seconds of warm-up and measuring per case; what was sampled by then, at least once, is the
    result."""

    def __post_init__(self) -> None:
        if self.memory_limit_gib is not None and not 0 < self.memory_limit_gib < 2**30:
            raise UsageError("--memory-limit-gib must be positive and finite")
        if not self.time_limit_s > 0:
            raise UsageError("--time-limit-s must be positive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeOverrides:
    """Dimensions that replace those of a preset, for a shape that has no name."""

    vocab_size: int | None = None
    """Vocabulary size."""
    d_model: int | None = None
    """Width of the residual stream."""
    d_ff: int | None = None
    """Width of the feed-forward layer."""
    num_layers: int | None = None
    """Number of blocks."""
    num_heads: int | None = None
    """Query heads."""
    num_kv_heads: int | None = None
    """Key and value heads."""
    tied_embeddings: bool = False
    """Let the output layer reuse the embedding."""

    def apply(self, name: str) -> tuple[str, ModelShape]:
        """Returns the preset as it is, or under the name custom with what was replaced."""
        replaced = {
            field: value
            for field, value in dataclasses.asdict(self).items()
            if value is not None and value is not False
        }
        shape = model_preset(name)
        if not replaced:
            return name, shape
        return "custom", dataclasses.replace(shape, **replaced)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCase:
    """One training step to measure."""

    model: str
    shape: ModelShape
    batch: BatchShape
    phase: Phase
    precision: PrecisionName
    compilation: Compilation
    activation_checkpointing: Literal["none", "full"]
    attention: AttentionImplementation
    device: DeviceName
    warmup: int
    steps: int
    time_limit_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSweep:
    """Time the forward pass, backward pass and optimizer of a language model."""

    model: tuple[str, ...] = ("small",)
    """Presets to measure."""
    context: tuple[int, ...] = (128,)
    """Context lengths, in tokens."""
    batch: int = 4
    """Sequences per step."""
    phase: tuple[Phase, ...] = ("train",)
    """How much of a step to run: train includes AdamW."""
    precision: tuple[PrecisionName, ...] = ("float32",)
    """Number formats; the sixteen-bit ones are autocast."""
    compile: bool = False
    """Compile the whole model with torch.compile."""
    compile_blocks: bool = False
    """Compile each block on its own."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """Recompute each block's activations during backward."""
    attention: AttentionImplementation = "auto"
    """What computes attention: auto takes Triton on CUDA and torch's fused kernel elsewhere; naive
    stores all scores."""
    warmup: tuple[int, ...] = (5,)
    """Steps to run before measuring."""
    steps: int = 10
    """Steps to measure."""
    device: DeviceName = "auto"
    """Where to run."""
    shape: ShapeOverrides = dataclasses.field(default_factory=ShapeOverrides)
    limits: RunLimits = dataclasses.field(default_factory=RunLimits)

    def __post_init__(self) -> None:
        require_counts(warmup=self.warmup, steps=self.steps)
        if self.compile and self.compile_blocks:
            raise UsageError("--compile and --compile-blocks exclude each other")

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommunicationCase:
    """One collective to measure."""

    operation: Operation
    size_bytes: int
    warmup: int
    steps: int
    time_limit_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommunicationSweep:
    """Time collectives by size and number of ranks."""

    operations: tuple[Operation, ...] = ("all_reduce",)
    """Collectives to measure."""
    sizes: tuple[str, ...] = ("1MB", "10MB", "100MB", "1GB")
    """Message sizes; MB is 10^6 bytes, MiB 2^20."""
    world_sizes: tuple[int, ...] = ()
    """Numbers of ranks to start, by default 2 and 4; under torchrun, Slurm or the lab the ranks
    are there already, and this must be left out."""
    warmup: int = 3
    """Calls to run before measuring, at least one."""
    steps: int = 20
    """Calls to measure."""
    device: DeviceName = "auto"
    """cuda measures NCCL between GPUs, cpu gloo."""
    time_limit_s: float = 20.0
    """Seconds of measuring per case; fewer calls are measured where they would take longer."""
    timeout_s: float = 120.0
    """Seconds after which a collective that makes no progress is an error."""

    def __post_init__(self) -> None:
        require_counts(warmup=(self.warmup,), steps=self.steps)
        if min(self.world_sizes, default=2) < 2:
            raise UsageError("--world-sizes must be at least 2")
        if not (self.time_limit_s > 0 and self.timeout_s > 0):
            raise UsageError("--time-limit-s and --timeout-s must be positive")

    def cases(self) -> Iterator[CommunicationCase]:
        """Yields every combination of operation and size, smallest first."""
        for operation in self.operations:
            for size_bytes in sorted(parse_bytes(size) for size in self.sizes):
                yield CommunicationCase(
                    operation=operation,
                    size_bytes=size_bytes,
                    warmup=self.warmup,
                    steps=self.steps,
                    time_limit_s=self.time_limit_s,
                )


def require_counts(*, warmup: tuple[int, ...], steps: int, name: str = "--steps") -> None:
    """Raises unless there is something to measure."""
    if min(warmup, default=0) < 0:
        raise UsageError("--warmup must not be negative")
    if steps < 1:
        raise UsageError(f"{name} must be at least 1")
