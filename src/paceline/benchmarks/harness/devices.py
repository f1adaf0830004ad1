"""What torch knows of this machine: devices, hardware names, backends and links."""

import contextlib
import dataclasses
import itertools

import torch
import torch.distributed as dist

from paceline.core.device_table import find_device
from paceline.core.errors import HardwareError, UsageError
from paceline.core.specs import DType, Precision
from paceline.records.environment import Environment, capture_environment, processor_name
from paceline.records.links import link_case_fields
from paceline.records.schema import CaseValue

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HardwareLocation:
    """The hardware that a case runs on, as its record has it."""

    device: str
    """cpu or cuda."""
    hardware: str
    """Name in the hardware table; else the driver's or the processor's own name."""
    threads: int
    """Threads that a CPU operation may use."""

    def as_case(self) -> dict[str, CaseValue]:
        """Returns the fields of a record's case, with the links where the lab shapes them."""
        return {**dataclasses.asdict(self), **link_case_fields()}


def resolve_device(name: str) -> torch.device:
    """Turns auto, cpu or cuda into a device; a missing one is an error."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device here; use --device cpu")
    return torch.device(name)


def describe_hardware(device: torch.device) -> HardwareLocation:
    """Names the hardware behind a device."""
    hardware = processor_name()
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
        # Where the table does not hold it, the driver's own name is still the truth.
        with contextlib.suppress(HardwareError):
            hardware = find_device(hardware).name
    return HardwareLocation(device=device.type, hardware=hardware, threads=torch.get_num_threads())


def peak_flops(location: HardwareLocation, precision: Precision) -> float | None:
    """Returns the dense peak for this precision, or None where no document states it."""
    dtype: DType = precision.compute
    if dtype == "float32" and torch.get_float32_matmul_precision() != "highest":
        dtype = "tfloat32"
    try:
        return find_device(location.hardware).peak(dtype).value
    except HardwareError:
        return None


def current_environment() -> Environment:
    """Describes this machine, accelerators included."""
    names = ("gloo", "nccl", "mpi", "ucc") if dist.is_available() else ()
    return capture_environment(
        devices=[torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        backends=[name for name in names if dist.is_backend_available(name)],
    )


def peer_links() -> list[str]:
    """Returns the pairs of accelerators that reach each other's memory directly."""
    return [
        f"cuda:{first} <-> cuda:{second} peer access"
        for first, second in itertools.combinations(range(torch.cuda.device_count()), 2)
        if torch.cuda.can_device_access_peer(first, second)
    ]
