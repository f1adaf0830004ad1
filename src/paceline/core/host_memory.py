"""How much memory a process has taken, and how much it may still take, as the kernel counts it."""

import contextlib
import os
import pathlib
import resource
import sys

from paceline.core.units import KIB

# Left to the rest of the machine when no limit is given.
_USABLE_FRACTION = 0.9


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


def resident_bytes() -> int:
    """Returns the memory this process has resident now, or its peak where only that is told."""
    resident = _kernel_bytes("/proc/self/status", "VmRSS:")
    return resident_peak_bytes() if resident is None else resident


def host_limit_bytes() -> int | None:
    """Returns what all processes may take: of the machine, or of the container that holds them."""
    limits = [each for each in (_cgroup_limit(), physical_memory_bytes()) if each is not None]
    return min(limits, default=None)


def usable_host_bytes() -> int | None:
    """Returns what new processes may take on this host, or None where nobody knows."""
    candidates = (_kernel_bytes("/proc/meminfo", "MemAvailable:"), host_limit_bytes())
    known = [value for value in candidates if value is not None]
    return int(min(known) * _USABLE_FRACTION) if known else None


def physical_memory_bytes() -> int | None:
    """Returns the machine's memory, where the operating system tells."""
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
