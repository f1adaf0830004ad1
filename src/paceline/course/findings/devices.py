"""Data-sheet values of the device that a record was measured on; None for unknown devices."""

from typing import cast

from paceline.core.errors import HardwareError
from paceline.core.hardware import find_device
from paceline.core.specs import DType
from paceline.records import Record


def memory_bandwidth(record: Record) -> float | None:
    """Returns the device's memory bandwidth in bytes per second."""
    try:
        return find_device(str(record.case["hardware"])).memory_bytes_per_s.value
    except HardwareError:
        return None


def peak_flops(record: Record, dtype: str) -> float | None:
    """Returns the device's peak FLOP/s in a dtype; the TF32 peak if float32 matmuls may use it."""
    if dtype == "float32" and record.case["float32_matmul_precision"] != "highest":
        dtype = "tfloat32"
    try:
        return find_device(str(record.case["hardware"])).peak(cast(DType, dtype)).value
    except HardwareError:
        return None
