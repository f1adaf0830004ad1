"""Memory over time from the profiler's allocation events.

torch keeps no peak for CPU memory, but its profiler reports every allocation and release
while it runs. What was allocated before is not in its sum: the caller adds what was live
then, and must not release any of it inside.
"""

import pathlib
import tempfile
from collections.abc import Callable, Mapping

import torch
from torch.profiler import record_function

from paceline.traces.capture.profiler import profiling
from paceline.traces.events.reader import AnyEvent, TraceReader

_MARK = "paceline.phase:"


def peak_allocations(phases: Mapping[str, Callable[[], None]]) -> dict[str, int]:
    """Runs the phases in turn and returns the peak of CPU bytes during each.

    Bytes count from the start of the first phase and include what earlier phases left
    allocated.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-trace-") as directory:
        path = pathlib.Path(directory) / "trace.json"
        with profiling(path, torch.device("cpu"), memory=True):
            for name, run in phases.items():
                with record_function(_MARK + name):
                    run()
        events = [event for piece in TraceReader(path, AnyEvent) for event in piece]
    ends = sorted(
        (event["ts"] + event["dur"], event["name"].removeprefix(_MARK))
        for event in events
        if event["name"].startswith(_MARK) and event["ph"] == "X"
    )
    changes = sorted(
        ((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"),
        key=lambda change: change[0],
    )
    peaks: dict[str, int] = {}
    allocated = position = 0
    for end, name in ends:
        peak = allocated
        while position < len(changes) and changes[position][0] <= end:
            allocated += changes[position][1]
            peak = max(peak, allocated)
            position += 1
        peaks[name] = peak
    return peaks
