"""A step's work, each instant of a thread given to one operator, and communication beside it."""

import dataclasses

import numpy as np
import numpy.typing as npt

from paceline.traces.catalog import EventTable
from paceline.traces.intervals import Intervals
from paceline.traces.self_time import self_times


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnWork:
    """Operators of one step; arrays of one length."""

    keys: Intervals
    starts: Intervals
    ends: Intervals
    """Inside of the step."""
    own: Intervals
    """Nanoseconds of each without those that it calls."""
    begins_here: npt.NDArray[np.bool_]
    """Whether the step is the one that an operator begins in, and is counted in."""


def own_work(work: EventTable, start: int, end: int) -> OwnWork:
    """Gives every instant of each thread to the operator that began last."""
    starts, ends = np.clip(work["start"], start, end), np.clip(work["end"], start, end)
    own = np.zeros(work.size, dtype=np.int64)
    by_thread = np.argsort(work["thread"], kind="stable")
    borders = np.flatnonzero(np.diff(work["thread"][by_thread])) + 1
    for mine in np.split(by_thread, borders):
        own[mine] = self_times(starts[mine], ends[mine])
    return OwnWork(
        keys=work["key"].astype(np.int64),
        starts=starts,
        ends=ends,
        own=own,
        begins_here=(work["start"] >= start) & (work["start"] < end),
    )
