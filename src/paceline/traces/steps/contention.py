"""How much communication slows what is computed beside it.

Both want the same cores, caches and memory. An operator with inputs of the same shapes is seen many
times: alone, and beside communication. What it takes longer beside, on average, is contention. An
operator that is never seen alone tells nothing, so a trace should hold steps without overlap too.
"""

import numpy as np

from paceline.traces.events import intervals
from paceline.traces.events.intervals import Intervals
from paceline.traces.events.spool import Spool
from paceline.traces.steps.self_time import SelfTimes

_SUM = np.dtype([("key", "i8"), ("count", "i8"), ("own", "i8")])


class ContentionTotals:
    """Adds operators up, alone and beside communication.

    What was beside communication is kept by step, on disk: only when all steps are known it can be
    compared.

    Args:
        num_keys: How many different operators there are.
    """

    def __init__(self, num_keys: int) -> None:
        self._num_alone = np.zeros(num_keys, dtype=np.int64)
        self._alone = np.zeros(num_keys, dtype=np.int64)
        self._sums = Spool(_SUM)
        self._steps: list[tuple[int, int]] = []

    def add(self, work: SelfTimes, communicating: Intervals) -> None:
        """Adds a step; an operator is beside communication if more than half of it is."""
        shared = intervals.covered(communicating, work.starts, work.ends)
        alone = shared == 0
        np.add.at(self._num_alone, work.keys[alone], 1)
        np.add.at(self._alone, work.keys[alone], work.self_time[alone])
        beside = 2 * shared > work.ends - work.starts
        keys, place = np.unique(work.keys[beside], return_inverse=True)
        sums = np.zeros(keys.size, dtype=_SUM)
        sums["key"] = keys
        np.add.at(sums["count"], place, 1)
        np.add.at(sums["own"], place, work.self_time[beside])
        self._steps.append((self._sums.append(sums), keys.size))

    def finish(self) -> list[int]:
        """Returns the nanoseconds of each step, in the order in which they were added."""
        seen_alone = self._num_alone > 0
        mean_alone = self._alone / np.maximum(self._num_alone, 1)
        contention = []
        with self._sums as spool:
            for begin, length in self._steps:
                sums = spool.read(begin, length)
                longer = sums["own"] - sums["count"] * mean_alone[sums["key"]]
                contention.append(max(0, round(float(longer[seen_alone[sums["key"]]].sum()))))
        return contention
