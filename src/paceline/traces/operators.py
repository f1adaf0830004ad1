"""Time, calls and FLOPs by operator, and how much communication slows operators down.

Each instant of a thread belongs to exactly one operator: the one that started last.

Computation and communication compete for the same cores, caches and memory bandwidth. An operator
with the same input shapes occurs many times, with and without communication in flight; its average
slowdown is contention. An operator that never runs without communication provides no baseline, so a
trace should also contain steps without overlap.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from paceline.core.ranges import WAIT, is_bucket_range, short_name, step_label
from paceline.traces import intervals
from paceline.traces.catalog import PROFILER_STEP, Catalog, EventTable, OpClass
from paceline.traces.event_buffer import EventBuffer
from paceline.traces.intervals import Intervals


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfTimes:
    """Operators of one step, as arrays of equal length."""

    keys: Intervals
    starts: Intervals
    ends: Intervals
    """Ends of the operators, clipped to the end of the step."""
    self_time: Intervals
    """Nanoseconds of each operator, excluding nested operators."""
    begins_here: npt.NDArray[np.bool_]
    """Whether each operator starts in this step, and so counts as one of its calls."""


def step_self_times(work: EventTable, start: int, end: int) -> SelfTimes:
    """Attributes every instant of each thread to the operator that started last."""
    starts, ends = np.clip(work["start"], start, end), np.clip(work["end"], start, end)
    own = np.zeros(work.size, dtype=np.int64)
    by_thread = np.argsort(work["thread"], kind="stable")
    borders = np.flatnonzero(np.diff(work["thread"][by_thread])) + 1
    for mine in np.split(by_thread, borders):
        own[mine] = self_times(starts[mine], ends[mine])
    return SelfTimes(
        keys=work["key"].astype(np.int64),
        starts=starts,
        ends=ends,
        self_time=own,
        begins_here=(work["start"] >= start) & (work["start"] < end),
    )


def self_times(starts: Intervals, ends: Intervals) -> Intervals:
    """Returns the self time of each event of one thread in nanoseconds.

    Of events that start together, the longer one is the caller; of equal ones, the earlier.
    """
    order = np.lexsort((np.arange(starts.size), -ends, starts))
    times = [0] * starts.size
    open_events: list[tuple[int, int]] = []
    now = last_end = 0
    for index, start, end in zip(
        order.tolist(), starts[order].tolist(), ends[order].tolist(), strict=True
    ):
        _give(times, open_events, now, start)
        now = start
        open_events.append((end, index))
        last_end = max(last_end, end)
    _give(times, open_events, now, last_end)
    return np.array(times, dtype=np.int64)


def _give(times: list[int], open_events: list[tuple[int, int]], now: int, until: int) -> None:
    """Attributes the time from `now` to `until` to the innermost open events."""
    while open_events and now < until:
        end, index = open_events[-1]
        if end > now:
            stop = min(end, until)
            times[index] += stop - now
            now = stop
        if end <= now:
            open_events.pop()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launches:
    """When the host launched the work of one step, and what it computes."""

    moments: Intervals
    """Starts of operators; of a kernel, the start of the operator that launched it, if known."""
    flops: Intervals
    """FLOPs of matmuls; those of an operator belong to the longest kernel that it launched."""


def launches(work: EventTable, operators: EventTable | None, catalog: Catalog) -> Launches:
    """Returns what the host says of the work of a step.

    `operators` are those of the host; None if they are the work.
    """
    if operators is None:
        return Launches(moments=work["start"], flops=catalog.flops()[work["key"]])
    moments, flops = work["start"].copy(), np.zeros(work.size, dtype=np.int64)
    by_number = operators[np.argsort(operators["operator"], kind="stable")]
    place = np.searchsorted(by_number["operator"], work["operator"])
    known = np.flatnonzero((work["operator"] > 0) & (place < by_number.size))
    known = known[by_number["operator"][place[known]] == work["operator"][known]]
    moments[known] = by_number["start"][place[known]]
    longest_first = known[np.argsort(work["start"][known] - work["end"][known], kind="stable")]
    _, first = np.unique(place[longest_first], return_index=True)
    longest = longest_first[first]
    flops[longest] = catalog.flops()[by_number["key"][place[longest]]]
    return Launches(moments=moments, flops=flops)


EVERYWHERE = "whole step"
"""Name of the range that stands for whole steps."""

_MAX_RANGES = 256
_REPEATS_OURS = (PROFILER_STEP, "Optimizer.zero_grad#")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperatorTime:
    """Totals of one operator inside all ranges of one name, over all steps and ranks."""

    range_name: str
    op_class: OpClass
    name: str
    num_calls: int
    self_time: int
    """Nanoseconds, excluding nested operators."""
    flops: int
    """FLOPs of matmuls, if the trace has input shapes."""


class OperatorTotals:
    """Accumulates operator times step by step."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._totals: dict[tuple[str, int], tuple[int, int, int]] = {}
        self._range_names: set[str] = set()

    def add(self, work: SelfTimes, launched: Launches, ranges: EventTable) -> None:
        """Adds a step with its ranges on the host."""
        self._add(EVERYWHERE, work, launched, np.ones(work.keys.size, dtype=np.bool_))
        for key in np.unique(ranges["key"]).tolist():
            name = self._catalog.keys[key].name
            if not self._is_wanted(name):
                continue
            chosen = ranges[ranges["key"] == key]
            inside = intervals.union(chosen["start"], chosen["end"])
            if inside.size:
                index = np.searchsorted(inside[:, 0], launched.moments, side="right") - 1
                inside_range = (index >= 0) & (launched.moments < inside[index, 1])
                self._add(short_name(name), work, launched, inside_range)

    def rows(self) -> tuple[OperatorTime, ...]:
        """Returns the totals by range and operator, the longest first within a range."""
        sums: dict[tuple[str, str], list[int]] = {}
        op_classes: dict[str, OpClass] = {}
        for (range_name, number), values in self._totals.items():
            key = self._catalog.keys[number]
            op_classes[key.name] = key.op_class
            total = sums.setdefault((range_name, key.name), [0, 0, 0])
            for column, value in enumerate(values):
                total[column] += value
        rows = [
            OperatorTime(
                range_name=range_name,
                op_class=op_classes[name],
                name=name,
                num_calls=num_calls,
                self_time=own,
                flops=flops,
            )
            for (range_name, name), (num_calls, own, flops) in sums.items()
        ]
        return tuple(sorted(rows, key=lambda row: (row.range_name, -row.self_time, row.name)))

    def _is_wanted(self, name: str) -> bool:
        if step_label(name) is not None or is_bucket_range(name) or name == WAIT:
            return False
        if name.startswith(_REPEATS_OURS):
            return False
        # Bound memory for a trace whose ranges all have distinct names.
        if len(self._range_names) < _MAX_RANGES:
            self._range_names.add(name)
        return name in self._range_names

    def _add(
        self, range_name: str, work: SelfTimes, launched: Launches, chosen: npt.NDArray[np.bool_]
    ) -> None:
        keys, row = np.unique(work.keys[chosen], return_inverse=True)
        begins = work.begins_here[chosen]
        calls = np.bincount(row, begins, keys.size).astype(np.int64)
        own = np.zeros(keys.size, dtype=np.int64)
        np.add.at(own, row, work.self_time[chosen])
        # Floats: impossible shapes in a damaged trace must not wrap around.
        flops = np.bincount(row, launched.flops[chosen] * begins, keys.size)
        for key, *added in zip(
            keys.tolist(), calls.tolist(), own.tolist(), map(int, flops), strict=True
        ):
            before = self._totals.get((range_name, key), (0, 0, 0))
            self._totals[range_name, key] = (
                before[0] + added[0],
                before[1] + added[1],
                before[2] + added[2],
            )


_SUM = np.dtype([("key", "i8"), ("count", "i8"), ("self_time", "i8")])


class ContentionTotals:
    """Accumulates operator times, with and without communication in flight.

    Times with communication in flight are stored per step on disk, because the baseline is known
    only after all steps.
    """

    def __init__(self, num_keys: int) -> None:
        self._num_free = np.zeros(num_keys, dtype=np.int64)
        self._free = np.zeros(num_keys, dtype=np.int64)
        self._sums = EventBuffer(_SUM)
        self._steps: list[tuple[int, int]] = []

    def add(self, work: SelfTimes, communicating: Intervals) -> None:
        """Adds a step; an operator counts as concurrent if over half of it overlaps."""
        shared = intervals.covered(communicating, work.starts, work.ends)
        free = shared == 0
        np.add.at(self._num_free, work.keys[free], 1)
        np.add.at(self._free, work.keys[free], work.self_time[free])
        beside = 2 * shared > work.ends - work.starts
        keys, row = np.unique(work.keys[beside], return_inverse=True)
        sums = np.zeros(keys.size, dtype=_SUM)
        sums["key"] = keys
        np.add.at(sums["count"], row, 1)
        np.add.at(sums["self_time"], row, work.self_time[beside])
        self._steps.append((self._sums.append(sums), keys.size))

    def finish(self) -> list[int]:
        """Returns the contention of each step in nanoseconds, in insertion order."""
        seen_free = self._num_free > 0
        mean_free = self._free / np.maximum(self._num_free, 1)
        contention = []
        with self._sums as buffer:
            for begin, length in self._steps:
                sums = buffer.read(begin, length)
                longer = sums["self_time"] - sums["count"] * mean_free[sums["key"]]
                contention.append(max(0, round(float(longer[seen_free[sums["key"]]].sum()))))
        return contention
