"""What devices and links reach: the constants that the time of a step is worked out with.

Three of them are always needed: a rate for matmuls, a memory bandwidth and the links. Every other
one belongs to a term that is off by default, and that a calibration turns on
(`paceline.planner.calibrations`): no vendor states it.
"""

import dataclasses
from typing import NamedTuple

from paceline.core.errors import UsageError
from paceline.planner.cost.measured_cells import MeasuredCells
from paceline.planner.cost.topology import Tiers


class Engine(NamedTuple):
    """What torch's engine takes whatever the sizes are: on CPUs nothing hides it."""

    block_s: float = 0.0
    """Of a block's pass, beyond its launches."""
    tensor_block_s: float = 0.0
    """Of a block's pass on tensor ranks, beyond that: dispatch of DTensors and their collectives'
    latency."""
    sequence_block_s: float = 0.0
    """As `tensor_block_s`, with sequence parallelism."""
    collective_s: float = 0.0
    """Of a collective of FSDP2, beyond its bytes."""
    stage_s: float = 0.0
    """Of a pass through a stage of a pipeline, beyond its blocks: the schedule, and a message to
    each neighbour."""


NO_ENGINE = Engine()
_RATES = ("flops_per_s", "memory_bytes_per_s", "attention_flops_per_s", "update_bytes_per_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """What devices and links reach, as measured or as stated."""

    flops_per_s: float
    """Of one device on the model's matrices."""
    memory_bytes_per_s: float
    """Of one device in kernels that do little else than read and write."""
    tiers: Tiers
    launch_s: float = 0.0
    """Of one kernel, as far as the kernel before does not hide it."""
    dispatch_s: float = 0.0
    """In which the host launches one kernel: a layer is never faster than its launches."""
    attention_flops_per_s: float | None = None
    """Of one device in attention's own matmuls; None for the rate of the matrices."""
    matmul_tokens: float = 0.0
    """Tokens in a pass with which a matmul reaches half of its rate."""
    matmul_width: float = 0.0
    """Columns of a matrix, after tensor parallelism, with which a matmul reaches half its rate."""
    misaligned: float = 0.0
    """Share of its time that a matmul takes longer whose width is no multiple of 128 elements."""
    exposed_share: float = 0.0
    """Share of the data-parallel traffic that no pass hides, however long."""
    contention: float = 0.0
    """Share by which data-parallel traffic slows down each time the number of hosts doubles."""
    step_s: float = 0.0
    """Of a step, whatever its work: data, logging, the launches of the optimizer."""
    update_bytes_per_s: float | None = None
    """Of one device in the optimizer's step; None for the memory's rate."""
    engine: Engine = NO_ENGINE
    oversubscription: float = 1.0
    """Ranks that share a processor: while one waits, another has it for itself."""
    cells: MeasuredCells | None = None
    """What measured runs of the same sizes took beyond the formulas."""

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
