"""Achieved rates of devices and links: the constants of the step-time model.

Three are required: the matmul rate, the memory bandwidth and the links. Every other constant
belongs to a term that is off by default. Vendors do not state these constants, so only a
calibration (`paceline.planner.calibrations`) enables them.
"""

import dataclasses
from typing import NamedTuple

from paceline.core.errors import UsageError
from paceline.planner.cost.measured_cells import MeasuredCells
from paceline.planner.cost.topology import Tiers


class Engine(NamedTuple):
    """Size-independent overhead of torch's engine. On CPUs nothing hides it."""

    block_s: float = 0.0
    """Seconds per block and pass, beyond its launches."""
    tensor_block_s: float = 0.0
    """Extra seconds per block and pass on tensor ranks: DTensor dispatch and the latency of their
    collectives."""
    sequence_block_s: float = 0.0
    """Same as `tensor_block_s`, with sequence parallelism."""
    collective_s: float = 0.0
    """Seconds per FSDP2 collective, beyond its transfer time."""
    stage_s: float = 0.0
    """Seconds per pass through a pipeline stage, beyond its blocks: the schedule, and a message to
    each neighbour."""


NO_ENGINE = Engine()
_RATES = ("flops_per_s", "memory_bytes_per_s", "attention_flops_per_s", "update_bytes_per_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Achieved rates of devices and links, measured or stated."""

    flops_per_s: float
    """Matmul rate of one device on the model's weight matrices."""
    memory_bytes_per_s: float
    """Bandwidth of one device in memory-bound kernels."""
    tiers: Tiers
    launch_s: float = 0.0
    """Seconds per kernel launch that the preceding kernel does not hide."""
    dispatch_s: float = 0.0
    """Host seconds to launch one kernel. A layer is never faster than its launches."""
    attention_flops_per_s: float | None = None
    """Rate of one device in the matmuls inside attention; None to use `flops_per_s`."""
    matmul_tokens: float = 0.0
    """Tokens per pass at which a matmul reaches half of its rate."""
    matmul_width: float = 0.0
    """Matrix width, after tensor parallelism, at which a matmul reaches half of its rate."""
    misaligned: float = 0.0
    """Relative slowdown of a matmul whose width is not a multiple of 128 elements."""
    exposed_share: float = 0.0
    """Fraction of data-parallel communication that is exposed regardless of the pass length."""
    contention: float = 0.0
    """Relative slowdown of data-parallel traffic per doubling of the number of hosts."""
    step_s: float = 0.0
    """Fixed seconds per step: data loading, logging, launches of the optimizer."""
    update_bytes_per_s: float | None = None
    """Bandwidth of one device in the optimizer step; None to use `memory_bytes_per_s`."""
    engine: Engine = NO_ENGINE
    oversubscription: float = 1.0
    """Number of ranks that share a processor. While one waits, another can use it alone."""
    cells: MeasuredCells | None = None
    """Correction factors from measured runs of the same sizes."""

    def __post_init__(self) -> None:
        for field in _RATES:
            value = getattr(self, field)
            if value is not None and value <= 0:
                raise UsageError(f"Cluster.{field} is {value}; it must be positive")
        if self.oversubscription < 1:
            raise UsageError(
                f"Cluster.oversubscription is {self.oversubscription}; it must be 1 or more"
            )
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.default == 0.0 and value < 0:
                raise UsageError(f"Cluster.{each.name} is {value}; it must be 0 or more")
