"""Configuration of attention benchmarks. Free of torch, because the command line imports it."""

import dataclasses
import itertools
from collections.abc import Iterator

from paceline.benchmarks.harness.config import (
    DeviceName,
    PrecisionName,
    RunLimits,
    TimedCase,
    require_counts,
)
from paceline.core.errors import UsageError
from paceline.core.specs import AttentionKind, BatchShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCase(TimedCase):
    """One attention operation to measure, of a single head."""

    implementation: AttentionKind
    batch: BatchShape
    head_dim: int
    dtype: PrecisionName
    causal: bool
    compiled: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSweep:
    """Time attention forward and backward, and measure the memory it saves for backward."""

    implementation: tuple[AttentionKind, ...] = ("naive",)
    """Implementations to measure, one after the other."""
    head_dim: tuple[int, ...] = (16, 32, 64, 128)
    """Head dimensions; there is one head."""
    context: tuple[int, ...] = (256, 1024, 4096, 8192, 16384)
    """Context lengths, in tokens."""
    batch: int = 8
    """Sequences per batch."""
    dtype: tuple[PrecisionName, ...] = ("float32",)
    """dtypes of queries, keys and values."""
    causal: bool = False
    """Use a causal mask."""
    compile: bool = False
    """Compile the operation with torch.compile."""
    warmup: int = 5
    """Warm-up: forward and backward passes before measuring."""
    steps: int = 100
    """Forward and backward passes to measure; on CUDA, approximate."""
    device: DeviceName = "auto"
    """Device to run on."""
    limits: RunLimits = dataclasses.field(default_factory=lambda: RunLimits(time_limit_s=30.0))

    def __post_init__(self) -> None:
        require_counts(warmup=(self.warmup,), steps=self.steps)
        if min(self.head_dim, default=1) < 1:
            raise UsageError("--head-dim must be at least 1")

    def cases(self) -> Iterator[AttentionCase]:
        """Yields every combination; the implementations to compare are adjacent."""
        for dtype, head_dim, context, implementation in itertools.product(
            self.dtype, self.head_dim, self.context, self.implementation
        ):
            yield AttentionCase(
                implementation=implementation,
                batch=BatchShape(num_sequences=self.batch, context_length=context),
                head_dim=head_dim,
                dtype=dtype,
                causal=self.causal,
                compiled=self.compile,
                device=self.device,
                warmup=self.warmup,
                steps=self.steps,
                time_limit_s=self.limits.time_limit_s,
            )
