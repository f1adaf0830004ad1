"""Self time of operators: attributes each instant of a thread to exactly one operator."""

import dataclasses

import numpy as np
import numpy.typing as npt

from paceline.traces.events.catalog import EventTable
from paceline.traces.events.intervals import Intervals


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
