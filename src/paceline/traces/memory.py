"""Memory over one step, from the allocations that torch's profiler reports.

Parameters, optimizer state and other memory that exists before the step are constant. Memory that
the step allocates is categorised as gradients if a parameter's gradient uses it at the end of
backward, as activations if it is live at the end of forward, and otherwise as temporary.

The profiler reports each allocation and release as an instant on its thread, along with the Python
functions and operators that are open at that time. The place of an allocation is the innermost
Python line outside torch. Backward runs no Python: there the place is the line whose forward
operator has the same sequence number, prefixed with the name of the backward operator.

Earlier allocations are not recorded. The caller must account for them, and must not release any of
them while recording. A release is reported after the fact: another thread may have allocated the
same address in between and reported it first, so an allocation at a live address ends the previous
one there.
"""

import collections
import dataclasses
import enum
import pathlib
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.profiler import record_function

from paceline.core.ranges import BACKWARD, FORWARD
from paceline.traces.capture import profiling
from paceline.traces.reader import AnyEvent, TraceReader

_MEMORY = "[memory]"
_BACKWARD_PREFIX = "autograd::engine::evaluate_function: "
_SEQUENCE = "Sequence number"
_OUTSIDE = re.compile(r"^(torch/|<built-in|contextlib\.py|nn\.Module: |\.\.\.)|/(torch|contextlib)")
_CPU_DEVICE_TYPE = 0
_MARK = "paceline.phase:"
_NUM_LARGEST = 10
"""Number of groups of allocations that a timeline lists."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allocation:
    """One block of memory; times are microseconds of the trace."""

    address: int
    num_bytes: int
    start: float
    end: float | None
    """Time of the release; None if it was not released."""
    place: str
    operator: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllocationTrace:
    """The allocations and named ranges of a trace."""

    allocations: list[Allocation]
    ranges: dict[str, tuple[float, float]]
    """First start and last end of each range, by name."""


def read_allocations(path: pathlib.Path, *, on_device: bool) -> AllocationTrace:
    """Reads the allocations of a trace recorded with memory and stacks."""
    spans: dict[Any, list[AnyEvent]] = {}
    instants: list[AnyEvent] = []
    ranges: dict[str, tuple[float, float]] = {}
    for events in TraceReader(path, AnyEvent):
        for event in events:
            if event.get("name") == _MEMORY:
                if (event["args"]["Device Type"] != _CPU_DEVICE_TYPE) == on_device:
                    instants.append(event)
            elif event.get("cat") in ("cpu_op", "python_function"):
                spans.setdefault(event["tid"], []).append(event)
            elif event.get("cat") == "user_annotation":
                start, end = event["ts"], event["ts"] + event["dur"]
                first, last = ranges.get(event["name"], (start, end))
                ranges[event["name"]] = (min(first, start), max(last, end))
    instants.sort(key=lambda event: event["ts"])
    return AllocationTrace(allocations=list(_pair(_placed(instants, spans))), ranges=ranges)


def _placed(
    instants: Iterable[AnyEvent], spans: dict[Any, list[AnyEvent]]
) -> list[tuple[AnyEvent, str, str]]:
    """Returns each instant with its place and operator, in chronological order."""
    by_thread: dict[Any, list[AnyEvent]] = {}
    for event in instants:
        by_thread.setdefault(event["tid"], []).append(event)
    forward_places: dict[int, str] = {}
    placed: list[tuple[AnyEvent, str, str]] = []
    for thread, on_thread in by_thread.items():
        stacks = _Stacks(spans.get(thread, []), forward_places)
        placed += [(event, *stacks.at(event["ts"])) for event in on_thread]
    return sorted(placed, key=lambda entry: entry[0]["ts"])


class _Stacks:
    """Tracks the open functions and operators of one thread over time.

    `forward_places` maps sequence numbers to lines; it is both read and updated.
    """

    def __init__(self, spans: list[AnyEvent], forward_places: dict[int, str]) -> None:
        self._spans = sorted(spans, key=lambda event: (event["ts"], -event["dur"]))
        self._next = 0
        self._open: list[AnyEvent] = []
        self._forward_places = forward_places

    def at(self, moment: float) -> tuple[str, str]:
        """Returns the place and operator at a moment; moments must not decrease."""
        while self._next < len(self._spans) and self._spans[self._next]["ts"] <= moment:
            span = self._spans[self._next]
            self._close_before(span["ts"])
            self._open.append(span)
            self._next += 1
            self._learn_forward(span)
        self._close_before(moment)
        operator = next((s["name"] for s in reversed(self._open) if s["cat"] == "cpu_op"), "")
        for span in self._open:
            if span["name"].startswith(_BACKWARD_PREFIX):
                sequence = span.get("args", {}).get(_SEQUENCE)
                name = span["name"].removeprefix(_BACKWARD_PREFIX)
                line = self._forward_places.get(sequence)
                return (f"{name} of {line}" if line else name), operator
        return self._line(), operator

    def _close_before(self, moment: float) -> None:
        while self._open and self._open[-1]["ts"] + self._open[-1]["dur"] < moment:
            self._open.pop()

    def _learn_forward(self, span: AnyEvent) -> None:
        sequence = span.get("args", {}).get(_SEQUENCE)
        if sequence is None or span["cat"] != "cpu_op":
            return
        if not any(other["name"].startswith(_BACKWARD_PREFIX) for other in self._open):
            self._forward_places.setdefault(sequence, self._line())

    def _line(self) -> str:
        """Returns the innermost Python line outside torch."""
        for span in reversed(self._open):
            if span["cat"] == "python_function" and not _OUTSIDE.search(span["name"]):
                return str(span["name"])
        return ""


def _pair(placed: Iterable[tuple[AnyEvent, str, str]]) -> Iterator[Allocation]:
    """Pairs each allocation with its release."""
    live: dict[int, Allocation] = {}
    ended: collections.Counter[int] = collections.Counter()
    for event, place, operator in placed:
        address, num_bytes = event["args"]["Addr"], event["args"]["Bytes"]
        if num_bytes > 0:
            if address in live:
                ended[address] += 1
                yield dataclasses.replace(live[address], end=event["ts"])
            live[address] = Allocation(
                address=address,
                num_bytes=num_bytes,
                start=event["ts"],
                end=None,
                place=place,
                operator=operator,
            )
        elif ended[address]:
            ended[address] -= 1
        elif address in live:
            yield dataclasses.replace(live.pop(address), end=event["ts"])
    yield from live.values()


class Category(enum.StrEnum):
    """Purposes of memory."""

    PARAMETERS = "parameters"
    OPTIMIZER_STATE = "optimizer_state"
    OTHER = "other"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    TEMPORARY = "temporary"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllocationGroup:
    """Allocations with the same size, place, operator and category."""

    category: Category
    num_bytes: int
    """Size of one allocation."""
    operator: str
    place: str
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryTimeline:
    """Bytes by category over time, downsampled to the peaks."""

    times_s: list[float]
    """Seconds from the start of the step."""
    num_bytes: dict[Category, list[int]]
    peak_bytes: int
    peak_by_category: dict[Category, int]
    phases_s: dict[str, tuple[float, float]]
    largest: list[AllocationGroup]
    """Groups of allocations, in descending order of allocation size."""


def memory_timeline(
    trace: AllocationTrace,
    *,
    resident: Mapping[Category, int],
    gradient_addresses: Collection[int],
    num_points: int = 400,
) -> MemoryTimeline:
    """Stacks a step's memory on top of the `resident` memory.

    `gradient_addresses` are the addresses of gradients at the end of backward. Time is divided
    into `num_points` intervals, and the moment with the most memory is kept for each.
    """
    categorized = [
        (_category(allocation, trace.ranges, gradient_addresses), allocation)
        for allocation in trace.allocations
    ]
    changes: list[tuple[float, Category, int]] = []
    for category, allocation in categorized:
        changes.append((allocation.start, category, allocation.num_bytes))
        if allocation.end is not None:
            changes.append((allocation.end, category, -allocation.num_bytes))
    changes.sort(key=lambda change: change[0])
    order = list(Category)
    deltas = np.zeros((len(changes) + 1, len(order)), dtype=np.int64)
    deltas[0] = [resident.get(category, 0) for category in order]
    for row, (_, category, num_bytes) in enumerate(changes, start=1):
        deltas[row, order.index(category)] = num_bytes
    stacked = deltas.cumsum(axis=0)
    begin = min((start for start, _ in trace.ranges.values()), default=0.0)
    times = np.array([begin, *(time for time, _, _ in changes)])
    totals = stacked.sum(axis=1)
    kept = _kept(times, totals, num_points)
    peak = int(np.argmax(totals))
    return MemoryTimeline(
        times_s=((times[kept] - begin) / 1e6).tolist(),
        num_bytes=dict(zip(order, stacked[kept].T.tolist(), strict=True)),
        peak_bytes=int(totals[peak]),
        peak_by_category=dict(zip(order, stacked[peak].tolist(), strict=True)),
        phases_s={
            name: ((start - begin) / 1e6, (end - begin) / 1e6)
            for name, (start, end) in trace.ranges.items()
        },
        largest=_largest(categorized),
    )


def _largest(categorized: Sequence[tuple[Category, Allocation]]) -> list[AllocationGroup]:
    counts = collections.Counter(
        (allocation.num_bytes, category, allocation.operator, allocation.place)
        for category, allocation in categorized
    )
    return [
        AllocationGroup(
            category=category, num_bytes=num_bytes, operator=operator, place=place, count=count
        )
        for (num_bytes, category, operator, place), count in sorted(
            counts.items(), key=lambda item: (-item[0][0], -item[1])
        )[:_NUM_LARGEST]
    ]


def _category(
    allocation: Allocation, ranges: Mapping[str, tuple[float, float]], gradients: Collection[int]
) -> Category:
    if BACKWARD not in ranges:
        return Category.TEMPORARY  # Without backward there are no activations to keep.
    if allocation.address in gradients and _lives_at(allocation, ranges[BACKWARD][1]):
        return Category.GRADIENTS
    if _lives_at(allocation, ranges[FORWARD][1]):
        return Category.ACTIVATIONS
    return Category.TEMPORARY


def _lives_at(allocation: Allocation, moment: float) -> bool:
    return allocation.start <= moment and (allocation.end is None or allocation.end > moment)


def _kept(times: np.ndarray, totals: np.ndarray, num_points: int) -> list[int]:
    """Returns the index with the most memory in each interval of time, and the last index."""
    span = max(float(times[-1] - times[0]), 1e-9)
    stretch = np.minimum(((times - times[0]) / span * num_points).astype(int), num_points - 1)
    most: dict[int, int] = {}
    for index, number in enumerate(stretch.tolist()):
        if number not in most or totals[index] > totals[most[number]]:
            most[number] = index
    return sorted({*most.values(), len(times) - 1})


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
        (event for event in events if event["name"] == _MEMORY), key=lambda event: event["ts"]
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
    """Yields the change in allocated bytes for each address and bytes; a release is negative."""
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
