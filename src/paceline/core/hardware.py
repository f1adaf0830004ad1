"""Devices and links, each figure with the document that states it.

Peaks are dense: vendors print the doubled figure of 2:4 sparsity in larger type, and no
training run reaches for it. Hardware that the table does not hold is an error, never a
guess: a utilisation against the wrong peak is worse than none.
"""

import dataclasses
from collections.abc import Mapping

from paceline.core.errors import HardwareError
from paceline.core.specs import DType


@dataclasses.dataclass(frozen=True)
class SourcedValue:
    """A number and where it is stated."""

    value: float
    """In the unit of the field that holds it."""
    source: str
    """The document."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """A way for a device to reach another."""

    name: str
    """What the vendor calls it."""
    bytes_per_s: SourcedValue
    """Bandwidth of one device in one direction, all its lanes together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, as its vendor describes it."""

    name: str
    """Identifier, as used in plans and records."""
    description: str
    """Name for people, with form factor and memory size."""
    reported_names: tuple[str, ...]
    """What the driver calls it (``torch.cuda.get_device_name``)."""
    peak_flops: Mapping[DType, SourcedValue]
    """Dense matrix FLOP/s by operand dtype, accumulating in float32."""
    memory_bytes: SourcedValue
    """Memory capacity as advertised."""
    memory_bytes_per_s: SourcedValue
    """Memory bandwidth."""
    links: tuple[Link, ...]
    """Links to other devices, the fastest first."""

    def peak(self, dtype: DType) -> SourcedValue:
        """Returns the peak for operands of `dtype`, or says which formats are known."""
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise HardwareError(f"{self.name} has no known peak for {dtype}; known: {known}")
        return self.peak_flops[dtype]
