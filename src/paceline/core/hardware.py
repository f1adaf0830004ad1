"""Devices and links; each figure names its source document.

Peaks are dense: vendors advertise the doubled figure of 2:4 sparsity, which training does not
use. Hardware that is missing from the table is an error, never a guess: a utilisation computed
from the wrong peak is worse than none.
"""

import dataclasses
from collections.abc import Mapping

from paceline.core.errors import HardwareError
from paceline.core.specs import DType


@dataclasses.dataclass(frozen=True)
class SourcedValue:
    """A number and its source."""

    value: float
    """The number, in the unit of the field that holds it."""
    source: str
    """The document that states the number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """A connection between devices."""

    name: str
    """The vendor's name for it."""
    bytes_per_s: SourcedValue
    """Bandwidth per device and direction, summed over all lanes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, as specified by its vendor."""

    name: str
    """Identifier used in plans and records."""
    description: str
    """Display name, with form factor and memory size."""
    reported_names: tuple[str, ...]
    """Names that the driver reports (``torch.cuda.get_device_name``)."""
    peak_flops: Mapping[DType, SourcedValue]
    """Dense matmul FLOP/s by operand dtype, accumulating in float32."""
    memory_bytes: SourcedValue
    """Memory capacity as advertised."""
    memory_bytes_per_s: SourcedValue
    """Memory bandwidth."""
    links: tuple[Link, ...]
    """Links to other devices, fastest first."""

    def peak(self, dtype: DType) -> SourcedValue:
        """Returns the peak FLOP/s for operands of `dtype`; raises if it is not known."""
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise HardwareError(f"{self.name} has no known peak for {dtype}; known: {known}")
        return self.peak_flops[dtype]
