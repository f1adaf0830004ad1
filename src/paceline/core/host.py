"""The host as the kernel reports it: memory in use and still available, and processors."""

import contextlib
import os
import pathlib
import resource
import sys

from paceline.core.units import KIB

# Fraction that new processes may use; the remainder is left to other programs.
_USABLE_FRACTION = 0.9


def available_processors() -> int:
    """Returns the number of CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_rank(world_size: int) -> int:
    """Returns the number of threads per rank at which all ranks together fill the machine."""
    return max(1, available_processors() // world_size)


def reset_resident_peak() -> None:
    """Resets the peak that `resident_peak_bytes` returns, if the kernel supports it."""
    # Otherwise the peak is counted from the start of the process.
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/clear_refs").write_text("5")


def resident_peak_bytes() -> int:
    """Returns the peak resident memory of this process since the last reset."""
    if (resident := _kernel_bytes("/proc/self/status", "VmHWM:")) is not None:
        return resident
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KIB


def resident_bytes() -> int:
    """Returns the resident memory of this process, or its peak if only that is available."""
    resident = _kernel_bytes("/proc/self/status", "VmRSS:")
    return resident_peak_bytes() if resident is None else resident


def host_limit_bytes() -> int | None:
    """Returns the smaller of the container's memory limit and physical memory, if known."""
    limits = [each for each in (_cgroup_limit(), physical_memory_bytes()) if each is not None]
    return min(limits, default=None)


def usable_host_bytes() -> int | None:
    """Returns the memory that new processes may use on this host; None if unknown."""
    candidates = (_kernel_bytes("/proc/meminfo", "MemAvailable:"), host_limit_bytes())
    known = [value for value in candidates if value is not None]
    return int(min(known) * _USABLE_FRACTION) if known else None


def physical_memory_bytes() -> int | None:
    """Returns the physical memory; None if the operating system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


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
