"""Peak memory from the profiler's allocation events.

torch tracks no peak for CPU memory, but its profiler reports every allocation and release while it
runs. Earlier allocations are not included: the caller adds the memory in use at the start, and must
not release any of it while recording.

A release is reported after the fact. Another thread may have allocated the same address in between
and reported it first, so an allocation at a live address ends the previous one there.
"""

import collections
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch.profiler import record_function

from paceline.traces.capture.profiler import profiling
from paceline.traces.events.reader import AnyEvent, TraceReader

_MARK = "paceline.phase:"


def peak_allocations(phases: Mapping[str, Callable[[], None]]) -> dict[str, int]:
    """Runs the phases in order and returns the peak of CPU bytes during each.

    Bytes are relative to the start of the first phase and include memory that earlier phases
    left allocated.
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
    reported = sorted(
        (event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]
    )
    sizes = allocation_changes((each["args"]["Addr"], each["args"]["Bytes"]) for each in reported)
    changes = [(each["ts"], size) for each, size in zip(reported, sizes, strict=True)]
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


def allocation_changes(reported: Iterable[tuple[int, int]]) -> Iterator[int]:
    """Yields the change in allocated bytes for each report.

    Args:
        reported: Addresses and bytes in chronological order; negative bytes for a release.
    """
    live: dict[int, int] = {}
    ended: collections.Counter[int] = collections.Counter()
    for address, size in reported:
        if size >= 0:
            before = live.get(address, 0)
            ended[address] += 1 if address in live else 0
            live[address] = size
            yield size - before
        elif ended[address]:
            ended[address] -= 1
            yield 0
        else:
            live.pop(address, None)
            yield size
