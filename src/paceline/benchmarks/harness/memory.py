"""How much memory a step takes, and how much there is.

Three points, as the hand-outs ask: after the model is made, before the optimizer steps, and
after. They are taken in a later step, when the optimizer's state exists: the first step
alone hides it behind the activations. On CUDA the allocator keeps the peak; on a CPU the
profiler's allocation events give it, and the kernel's own count of resident pages stands
beside.
"""

import contextlib
import pathlib
import resource
import sys
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from paceline.core.units import KIB
from paceline.records.environment import physical_memory_bytes
from paceline.traces.memory.peak import peak_allocations

# Left to the rest of the machine when no limit is given.
_USABLE_FRACTION = 0.9


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns what the tensors occupy, shared storage counted once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(storages.values())


def step_peaks(
    device: torch.device,
    *,
    resident_tensors: Iterable[Tensor],
    phases: dict[str, Callable[[], None]],
) -> dict[str, int]:
    """Runs the phases of one step in their order and returns the peak bytes of each.

    `resident_tensors` is what exists before the step and is not released by it.
    """
    if device.type != "cuda":
        resident = storage_bytes(resident_tensors)
        return {name: resident + peak for name, peak in peak_allocations(phases).items()}
    peaks = {}
    for name, run in phases.items():
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        peaks[name] = torch.cuda.max_memory_allocated(device)
    return peaks


def reset_resident_peak() -> None:
    """Lets `resident_peak_bytes` start anew, where the kernel can."""
    # Where it cannot, the peak is that of the process since its start.
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/clear_refs").write_text("5")


def resident_peak_bytes() -> int:
    """Returns the most memory this process had resident since the last reset."""
    if (resident := _kernel_bytes("/proc/self/status", "VmHWM:")) is not None:
        return resident
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KIB


def usable_memory_bytes(device: torch.device) -> int | None:
    """Returns what one case may take on this device, or None where nobody knows."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return free
    available = _kernel_bytes("/proc/meminfo", "MemAvailable:")
    candidates = (available, _cgroup_limit(), physical_memory_bytes())
    known = [value for value in candidates if value is not None]
    return int(min(known) * _USABLE_FRACTION) if known else None


def _kernel_bytes(path: str, name: str) -> int | None:
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * KIB for line in lines if line.startswith(name)), None)


def _cgroup_limit() -> int | None:
    try:
        return int(pathlib.Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        return None  # No cgroup, or the limit is "max".
