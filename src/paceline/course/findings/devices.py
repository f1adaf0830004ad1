"""What a data sheet says of the device that a record was measured on; None where there is none."""

from typing import cast

from paceline.core.device_table import find_device
from paceline.core.errors import HardwareError
from paceline.core.specs import DType
from paceline.records import Record


def memory_bandwidth(record: Record) -> float | None:
    """Returns the bytes per second of the device's memory."""
    try:
        return find_device(str(record.case["hardware"])).memory_bytes_per_s.value
    except HardwareError:
        return None


def peak_flops(record: Record, dtype: str) -> float | None:
    """Returns the device's peak in a dtype; that of TF32 where float32 matmuls are rounded."""
    if dtype == "float32" and record.case["float32_matmul_precision"] != "highest":
        dtype = "tfloat32"
    try:
        return find_device(str(record.case["hardware"])).peak(cast(DType, dtype)).value
    except HardwareError:
        return None
