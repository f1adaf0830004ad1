"""Measures how much communication slows concurrent computation.

Both compete for the same cores, caches and memory bandwidth. An operator with the same input shapes
occurs many times, with and without communication in flight; its average slowdown is contention. An
operator that never runs without communication provides no baseline, so a trace should also contain
steps without overlap.
"""

import numpy as np

from paceline.traces.events import intervals
from paceline.traces.events.intervals import Intervals
from paceline.traces.events.spool import Spool
from paceline.traces.steps.self_time import SelfTimes

_SUM = np.dtype([("key", "i8"), ("count", "i8"), ("self_time", "i8")])


class ContentionTotals:
    """Accumulates operator times, with and without communication in flight.

    Times with communication in flight are stored per step on disk, because the baseline is known
    only after all steps.
    """

    def __init__(self, num_keys: int) -> None:
        self._num_free = np.zeros(num_keys, dtype=np.int64)
        self._free = np.zeros(num_keys, dtype=np.int64)
        self._sums = Spool(_SUM)
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
        with self._sums as spool:
            for begin, length in self._steps:
                sums = spool.read(begin, length)
                longer = sums["self_time"] - sums["count"] * mean_free[sums["key"]]
                contention.append(max(0, round(float(longer[seen_free[sums["key"]]].sum()))))
        return contention
