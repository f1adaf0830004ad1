"""Finds each rank's steps, and whether it computes on a GPU."""

import pathlib

import numpy as np

from paceline.traces.events.catalog import Catalog, EventTable, Role
from paceline.traces.events.intervals import Intervals
from paceline.traces.events.reader import TraceError
from paceline.traces.events.spool import Spool

MAX_STEPS = 100_000
"""Limit for all ranks together; longer traces should be analysed in parts."""


class Timeline:
    """The steps of each rank, from all events of a trace; the path is used in error messages."""

    def __init__(self, events: Spool, catalog: Catalog, path: pathlib.Path) -> None:
        self._labels = catalog.step_labels()
        self._rank_of_thread = catalog.rank_of_thread()
        self._is_step = np.isin(np.arange(len(catalog.keys)), list(self._labels))
        self._is_device_work = catalog.roles() == Role.DEVICE_WORK
        self._found: dict[int, list[tuple[int, int, str]]] = {}
        self._reach: dict[int, tuple[int, int]] = {}
        self.device_ranks: set[int] = set()
        """Ranks that run work on a GPU."""
        for chunk in events.chunks():
            self._look_at(chunk)
            if sum(len(steps) for steps in self._found.values()) > MAX_STEPS:
                raise TraceError(f"{path}: more than {MAX_STEPS} steps; trace fewer steps")
        self.windows: dict[int, Intervals] = {}
        """Start and end of each rank's steps, in order and disjoint."""
        self.labels: dict[int, list[str]] = {}
        for rank, reach in sorted(self._reach.items()):
            whole = [] if self._labels else [(*reach, "")]
            steps = sorted(self._found.get(rank, whole))
            starts = np.array([start for start, _, _ in steps], dtype=np.int64)
            ends = np.array([end for _, end, _ in steps], dtype=np.int64)
            # Where steps overlap, the time belongs to the first.
            starts[1:] = np.maximum(starts[1:], np.maximum.accumulate(ends)[:-1])
            self.windows[rank] = np.stack((starts, np.maximum(starts, ends)), axis=1)
            self.labels[rank] = [label for _, _, label in steps]

    def _look_at(self, chunk: EventTable) -> None:
        ranks = self._rank_of_thread[chunk["thread"]]
        self.device_ranks.update(np.unique(ranks[self._is_device_work[chunk["key"]]]).tolist())
        for rank in np.unique(ranks).tolist():
            mine = chunk[ranks == rank]
            first, last = int(mine["start"].min()), int(mine["end"].max())
            before = self._reach.get(rank, (first, last))
            self._reach[rank] = (min(first, before[0]), max(last, before[1]))
        is_step = self._is_step[chunk["key"]]
        for event, rank in zip(chunk[is_step].tolist(), ranks[is_step].tolist(), strict=True):
            start, end, key, _thread = event
            self._found.setdefault(rank, []).append((start, end, self._labels[key]))
