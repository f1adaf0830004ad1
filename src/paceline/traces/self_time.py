"""To whom each instant of a thread belongs, where operators call each other.

At every instant it is the event that began last and has not ended. In a well-formed trace, where
each event lies within the one that called it, that is the innermost; the rule also holds where
events overlap in any other way, as in damaged traces.
"""

import numpy as np

from paceline.traces.intervals import Intervals


def self_times(starts: Intervals, ends: Intervals) -> Intervals:
    """Returns the nanoseconds that belong to each event of one thread.

    Of events that begin together, the longer one is the caller; of equal ones, the earlier.
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
    """Gives the time from now until a moment to the events that are open meanwhile."""
    while open_events and now < until:
        end, index = open_events[-1]
        if end > now:
            stop = min(end, until)
            times[index] += stop - now
            now = stop
        if end <= now:
            open_events.pop()
