"""Vendor-stated device figures, the starting point of a fit: peaks, bandwidths, links, domains.

Most come from the hardware table. Devices of published runs that are missing there are listed here
with their vendor's dense figures. Approximate figures suffice: the fitted shares absorb the error.
"""

import dataclasses

from paceline.core.device_table import find_device, known_devices
from paceline.core.errors import HardwareError

_DTYPES = ("bfloat16", "float16", "float8", "float4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceFigures:
    """Vendor-stated figures of one device."""

    half_flops_per_s: float
    """Dense bfloat16 and float16 peak."""
    memory_bytes_per_s: float
    inner_bytes_per_s: float
    """Bandwidth in one direction within the domain of the fastest link."""
    outer_bytes_per_s: float
    """Bandwidth in one direction between domains, with one network adapter per device."""
    domain: int = 8
    """Number of devices that the fastest link connects."""

    def peak(self, dtype: str) -> float:
        """Returns the dense matmul peak of a dtype. Each halving of the bits doubles it."""
        return self.half_flops_per_s * {"float8": 2.0, "float4": 4.0}.get(dtype, 1.0)


_GRACE_BLACKWELL = DeviceFigures(
    half_flops_per_s=2.5e15,
    memory_bytes_per_s=8e12,
    inner_bytes_per_s=900e9,
    outer_bytes_per_s=50e9,
    domain=64,
)
_BESIDE_THE_TABLE = {
    "gb200": _GRACE_BLACKWELL,
    "gb300": _GRACE_BLACKWELL,
    "b300": dataclasses.replace(_GRACE_BLACKWELL, domain=8),
    # torchtitan's H100s: 500 W, HBM2e.
    "h100-500w-hbm2e": DeviceFigures(
        half_flops_per_s=989.4e12,
        memory_bytes_per_s=2.4e12,
        inner_bytes_per_s=450e9,
        outer_bytes_per_s=50e9,
    ),
}
_NETWORK_BYTES_PER_S = {"a100": 25e9, "v100": 12.5e9}
_DEFAULT_NETWORK = 50e9


def device_figures(name: str) -> DeviceFigures:
    """Returns a device's stated figures, from this module or the hardware table."""
    if name in _BESIDE_THE_TABLE:
        return _BESIDE_THE_TABLE[name]
    device = find_device(name)
    generation = name.split("-", 1)[0]
    return DeviceFigures(
        half_flops_per_s=device.peak("bfloat16" if generation != "v100" else "float16").value,
        memory_bytes_per_s=device.memory_bytes_per_s.value,
        inner_bytes_per_s=device.links[0].bytes_per_s.value,
        outer_bytes_per_s=_NETWORK_BYTES_PER_S.get(generation, _DEFAULT_NETWORK),
    )


def calibratable_devices() -> tuple[str, ...]:
    """Returns the names of all devices with known figures."""
    return (*_BESIDE_THE_TABLE, *(device.name for device in known_devices()))


def require_device(name: str) -> DeviceFigures:
    """Returns a device's figures; raises an error that lists known devices otherwise."""
    try:
        return device_figures(name)
    except HardwareError as error:
        names = ", ".join(calibratable_devices())
        raise HardwareError(f"unknown device {name!r} in a row; known: {names}") from error
