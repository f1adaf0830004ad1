"""Reads every allocation of a recorded trace, with the line of code that caused it.

torch's profiler reports each allocation and release as an instant on its thread, along with the
Python functions and operators that are open at that time. The place of an allocation is the
innermost Python line outside torch. Backward runs no Python: there the place is the line whose
forward operator has the same sequence number, prefixed with the name of the backward operator.

Earlier allocations are not recorded. The caller must account for them, and must not release any of
them while recording.
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from paceline.traces.events.reader import AnyEvent, TraceReader

_MEMORY = "[memory]"
_BACKWARD_PREFIX = "autograd::engine::evaluate_function: "
_SEQUENCE = "Sequence number"
_OUTSIDE = re.compile(r"^(torch/|<built-in|contextlib\.py|nn\.Module: |\.\.\.)|/(torch|contextlib)")
_CPU_DEVICE_TYPE = 0


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
    for event, place, operator in placed:
        address, num_bytes = event["args"]["Addr"], event["args"]["Bytes"]
        if num_bytes > 0:
            live[address] = Allocation(
                address=address,
                num_bytes=num_bytes,
                start=event["ts"],
                end=None,
                place=place,
                operator=operator,
            )
        elif address in live:
            yield dataclasses.replace(live.pop(address), end=event["ts"])
    yield from live.values()
