"""The hardware that a rank runs on: its name, peak FLOP/s and memory."""

import contextlib
import dataclasses

import torch

from paceline.core.errors import HardwareError
from paceline.core.hardware import find_device
from paceline.core.host import host_limit_bytes, usable_host_bytes
from paceline.core.specs import DType, Precision
from paceline.devices import accelerator
from paceline.records.environment import processor_name
from paceline.records.links import link_case_fields
from paceline.records.schema import CaseValue


@dataclasses.dataclass(frozen=True, kw_only=True)
class HardwareLocation:
    """The hardware of a benchmark case, as stored in its record."""

    device: str
    """cpu, or the type of accelerator, such as cuda."""
    hardware: str
    """Name in the hardware table, or else the name that the driver or processor reports."""
    threads: int
    """Threads that a CPU operation may use."""

    def as_case(self) -> dict[str, CaseValue]:
        """Returns the fields of a record's case, including links if the lab shapes them."""
        return {**dataclasses.asdict(self), **link_case_fields()}


def describe_hardware(device: torch.device) -> HardwareLocation:
    """Returns a description of a device's hardware."""
    hardware = processor_name()
    if device.type != "cpu":
        hardware = accelerator.device_name(device)
        # If the table has no entry, the driver's name is kept.
        with contextlib.suppress(HardwareError):
            hardware = find_device(hardware).name
    return HardwareLocation(device=device.type, hardware=hardware, threads=torch.get_num_threads())


def peak_flops(location: HardwareLocation, precision: Precision) -> float | None:
    """Returns the dense peak FLOP/s for a precision, or None if the table does not list it."""
    dtype: DType = precision.compute
    if dtype == "float32" and torch.get_float32_matmul_precision() != "highest":
        dtype = "tfloat32"
    try:
        return find_device(location.hardware).peak(dtype).value
    except HardwareError:
        return None


def usable_memory_bytes(device: torch.device) -> int | None:
    """Returns the memory that is still available on an accelerator or the host; None if unknown."""
    if device.type == "cpu":
        return usable_host_bytes()
    free, _total = accelerator.free_and_total_bytes(device)
    return free


def memory_limit_bytes(device: torch.device) -> int | None:
    """Returns the total memory of an accelerator or the host; None if unknown."""
    if device.type == "cpu":
        return host_limit_bytes()
    _free, total = accelerator.free_and_total_bytes(device)
    return total
