"""Configuration of collective benchmarks. Free of torch, because the command line imports it."""

import dataclasses
from collections.abc import Iterator

from paceline.benchmarks.harness.config import DeviceName, require_counts
from paceline.core.collectives import Operation
from paceline.core.errors import UsageError
from paceline.core.units import parse_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveCase:
    """One collective to measure."""

    operation: Operation
    size_bytes: int
    warmup: int
    steps: int
    time_limit_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveSweep:
    """Time collectives by size and number of ranks, and fit their latency and bandwidth."""

    operations: tuple[Operation, ...] = ("all_reduce",)
    """Collectives to measure."""
    sizes: tuple[str, ...] = ("1MB", "10MB", "100MB", "1GB")
    """Message sizes; MB is 10^6 bytes, MiB 2^20."""
    world_sizes: tuple[int, ...] = ()
    """Numbers of ranks to start; by default 2 and 4. Leave this out under torchrun, Slurm or the
    lab, which start the ranks themselves."""
    warmup: int = 3
    """Warm-up calls before measuring, at least one."""
    steps: int = 20
    """Calls to measure."""
    device: DeviceName = "auto"
    """cuda measures NCCL between GPUs; cpu measures gloo."""
    time_limit_s: float = 20.0
    """Seconds of measuring per case; slow cases are measured with fewer calls."""
    timeout_s: float = 120.0
    """Seconds after which a collective without progress is an error."""

    def __post_init__(self) -> None:
        require_counts(warmup=(self.warmup,), steps=self.steps)
        if min(self.world_sizes, default=2) < 2:
            raise UsageError("--world-sizes must be at least 2")
        if not (self.time_limit_s > 0 and self.timeout_s > 0):
            raise UsageError("--time-limit-s and --timeout-s must be positive")

    def cases(self) -> Iterator[CollectiveCase]:
        """Yields every combination of operation and size, smallest first."""
        for operation in self.operations:
            for size_bytes in sorted(parse_bytes(size) for size in self.sizes):
                yield CollectiveCase(
                    operation=operation,
                    size_bytes=size_bytes,
                    warmup=self.warmup,
                    steps=self.steps,
                    time_limit_s=self.time_limit_s,
                )
