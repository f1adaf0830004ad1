"""Timestamps on a device's own timeline.

On a CPU a timestamp is a reading of the host's clock. A GPU runs asynchronously to the host, so its
timestamps are events in the current stream, and reading a duration waits for the device.
"""

import time
from collections.abc import Hashable
from typing import TypeAlias

import torch

Moment: TypeAlias = float | torch.cuda.Event


def now(device: torch.device) -> Moment:
    """Returns a timestamp of the current point on a device's timeline."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def current_stream(device: torch.device) -> Hashable:
    """Returns the current stream of a GPU; None for a CPU, which has none."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def seconds_between(start: Moment, end: Moment) -> float:
    """Returns the seconds between two timestamps of the same device."""
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has completed all queued work; does nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
