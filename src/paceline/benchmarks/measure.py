"""Timing: warm-up, a stopwatch that waits for the device, and the sampling loop.

A GPU runs behind the program that feeds it: without waiting for it, a timer measures how
long asking takes. Warm-up keeps one-time work (allocation, kernel selection, compilation)
out of the samples.
"""

import time
from collections.abc import Callable, Mapping

import torch

from paceline.benchmarks.devices import synchronize

Laps = Mapping[str, float]
Progress = Callable[[int, int], None]


class Stopwatch:
    """Laps that begin and end only when the device is idle."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        synchronize(device)
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Returns the seconds since the watch was made or the last lap was taken."""
        synchronize(self._device)
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed


def sample(
    run: Callable[[], Laps],
    *,
    warmup: int,
    steps: int,
    time_limit_s: float,
    on_progress: Progress,
) -> dict[str, list[float]]:
    """Runs `warmup` times unmeasured, then up to `steps` times, and gathers the laps.

    Stops early, with at least one sample, once `time_limit_s` has passed.
    """
    deadline = time.monotonic() + time_limit_s
    total = warmup + steps
    for completed in range(warmup):
        run()
        on_progress(completed + 1, total)
    samples: dict[str, list[float]] = {}
    for completed in range(steps):
        for name, seconds in run().items():
            samples.setdefault(name, []).append(seconds)
        on_progress(warmup + completed + 1, total)
        if time.monotonic() > deadline:
            break
    return samples
