"""Moments on a device's own time line.

On a CPU a moment is a reading of the program's clock. A GPU runs behind the program that feeds it,
so there a moment is an event in the current stream, and asking how long something took waits for
the device.
"""

import time
from collections.abc import Hashable
from typing import TypeAlias

import torch

Moment: TypeAlias = float | torch.cuda.Event


def now(device: torch.device) -> Moment:
    """Marks the present moment on a device."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def current_stream(device: torch.device) -> Hashable:
    """Returns what orders the work that is given to a device now; None for a CPU, which waits."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def seconds_between(start: Moment, end: Moment) -> float:
    """Returns the seconds from one moment to another of the same device."""
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that was asked of it; the CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
