"""Divides one step of one rank into computation, exposed communication and idle time.

C is the time in which the rank computes and M the time in which it communicates, both as sets of
instants within the step:

    overlapped   C and M
    exposed      M without C
    idle         neither
    busy         C = compute + contention

so that compute + contention + exposed + idle = step, exactly. Contention is the slowdown of
computation by concurrent communication. It needs a baseline without communication, so it is
computed over all steps (`steps.contention`).

On a GPU, C consists of kernels and copies, and M of nccl's kernels. On a CPU, C consists of
operators and the short pauses between them, which are interpreter overhead and not waiting; M
consists of gloo's collectives. Inside an explicit wait range, a pause never counts as computation.
"""

import dataclasses

import numpy as np

from paceline.core.ranges import WAIT
from paceline.traces import intervals
from paceline.traces.catalog import FUNCTIONAL_WAIT, Catalog, EventTable, Role
from paceline.traces.intervals import EMPTY, Intervals

INTERPRETER_PAUSE_NS = 500_000
"""Pauses between operators up to this long count as interpreter overhead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """A collective, or a named range; nanoseconds from the start of the step."""

    name: str
    start: int
    end: int
    exposed: int
    """Nanoseconds without concurrent computation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Nanoseconds of one step on one rank."""

    step: int
    busy: int
    communication: int
    overlapped: int
    exposed: int
    idle: int
    computing: Intervals
    """Intervals of computation, relative to the start of the step."""
    communicating: Intervals
    messages: tuple[Span, ...]
    """Collectives."""
    ranges: tuple[Span, ...]
    """Named ranges on the host. On a GPU, each from the first to the last kernel launched in it."""

    @property
    def num_spans(self) -> int:
        """Number of retained intervals, messages and ranges."""
        return len(self.computing) + len(self.communicating) + len(self.messages) + len(self.ranges)

    def summary(self) -> "StepTimes":
        """Returns the totals without intervals and spans."""
        return dataclasses.replace(
            self, computing=EMPTY, communicating=EMPTY, messages=(), ranges=()
        )


class StepRoles:
    """The events that overlap one step, grouped by role."""

    def __init__(self, events: EventTable, catalog: Catalog, *, has_device: bool) -> None:
        roles = catalog.roles()[events["key"]]
        work, communication = (
            (Role.DEVICE_WORK, Role.DEVICE_COMMUNICATION)
            if has_device
            else (Role.HOST_WORK, Role.HOST_COMMUNICATION)
        )
        self.communication = events[roles == communication]
        self.launchers = events[roles == Role.HOST_WORK] if has_device else None
        """Operators of the host that launch the work; None if they are the work."""
        self.host_ranges = events[roles == Role.HOST_RANGE]
        # Work on a collective's thread, such as a reduction, is part of the collective. A thread
        # that also has host ranges is the step's main thread, which may send and receive itself.
        lines = np.setdiff1d(self.communication["thread"], self.host_ranges["thread"])
        is_own = ~np.isin(events["thread"], lines)
        self.work = events[(roles == work) & (is_own | has_device)]
        names = [catalog.keys[key].name for key in self.host_ranges["key"].tolist()]
        self.waits = self.host_ranges[[name == WAIT for name in names]]
        self.blocked = self.host_ranges[[name == FUNCTIONAL_WAIT for name in names]]
        self.has_device = has_device


def step_times(
    roles: StepRoles, moments: Intervals, catalog: Catalog, start: int, end: int
) -> StepTimes:
    """Computes the time breakdown of the step from `start` to `end`.

    `moments` are those at which the host launched the work.
    """
    ranges = roles.host_ranges
    if roles.has_device:
        ranges = _on_device(ranges, roles.work, moments)
    computing = _computing(roles, start, end)
    communicating = _set_of(roles.communication, start, end)
    overlapped = intervals.overlap(computing, communicating)
    exposed = intervals.length(communicating) - overlapped
    busy = intervals.length(computing)
    return StepTimes(
        step=end - start,
        busy=busy,
        communication=intervals.length(communicating),
        overlapped=overlapped,
        exposed=exposed,
        idle=end - start - busy - exposed,
        computing=computing - start,
        communicating=communicating - start,
        messages=_spans(roles.communication, catalog, computing, start, end),
        ranges=_spans(ranges, catalog, computing, start, end),
    )


def _on_device(ranges: EventTable, work: EventTable, moments: Intervals) -> EventTable:
    """Returns the ranges in which work was launched, with the time of that work."""
    work = work[np.argsort(moments, kind="stable")]
    moments = np.sort(moments)
    first, last = (np.searchsorted(moments, ranges[side]) for side in ("start", "end"))
    placed = ranges[last > first].copy()
    for row, begin, end in zip(placed, first[last > first], last[last > first], strict=True):
        row["start"], row["end"] = work["start"][begin:end].min(), work["end"][begin:end].max()
    return placed


def _computing(roles: StepRoles, start: int, end: int) -> Intervals:
    operators = _set_of(roles.work, start, end)
    if roles.has_device:
        return operators
    if len(roles.blocked):
        awake = intervals.complement(_set_of(roles.blocked, start, end), start, end)
        operators = intervals.intersection(operators, awake)
    with_pauses = intervals.union(operators[:, 0], operators[:, 1], gap=INTERPRETER_PAUSE_NS)
    waits = _set_of(roles.waits, start, end)
    outside = intervals.complement(waits, start, end)
    kept = intervals.intersection(with_pauses, outside)
    return intervals.union(
        np.concatenate((operators[:, 0], kept[:, 0])), np.concatenate((operators[:, 1], kept[:, 1]))
    )


def _set_of(events: EventTable, start: int, end: int) -> Intervals:
    return intervals.clip(intervals.union(events["start"], events["end"]), start, end)


def _spans(
    events: EventTable, catalog: Catalog, computing: Intervals, start: int, end: int
) -> tuple[Span, ...]:
    ordered = np.sort(events, order=("start", "end"))
    starts, ends = np.clip(ordered["start"], start, end), np.clip(ordered["end"], start, end)
    exposed = ends - starts - intervals.covered(computing, starts, ends)
    columns = (ordered["key"], starts - start, ends - start, exposed)
    return tuple(
        Span(name=catalog.keys[key].name, start=begin, end=finish, exposed=bare)
        for key, begin, finish, bare in zip(*(c.tolist() for c in columns), strict=True)
    )
