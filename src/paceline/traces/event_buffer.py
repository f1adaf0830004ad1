"""Stores a trace's events on disk as fixed-size rows, to be read back step by step.

A row takes 32 bytes, a tenth or less of its size in the trace. Memory holds one chunk while the
trace is read, and one step of one rank while it is analysed.
"""

import tempfile
from collections.abc import Iterator, Mapping
from typing import IO, Self

import numpy as np
import numpy.typing as npt

from paceline.traces.catalog import EVENT, EventTable
from paceline.traces.intervals import Intervals

_CHUNK_ROWS = 2**18
_MAX_STEPS_OF_EVENT = 16


class EventBuffer:
    """A temporary file of fixed-size rows."""

    def __init__(self, row: "np.dtype[np.void]") -> None:
        self._row = row
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="paceline-trace-")  # noqa: SIM115
        self.num_rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, rows: EventTable) -> int:
        """Appends rows and returns the index of the first."""
        begin = self.num_rows
        self._file.seek(begin * self._row.itemsize)
        self._file.write(rows.tobytes())
        self.num_rows += rows.size
        return begin

    def read(self, begin: int, count: int) -> EventTable:
        """Returns `count` rows, starting at row `begin`."""
        self._file.seek(begin * self._row.itemsize)
        return np.frombuffer(self._file.read(count * self._row.itemsize), dtype=self._row)

    def chunks(self) -> Iterator[EventTable]:
        """Yields all rows in insertion order."""
        for begin in range(0, self.num_rows, _CHUNK_ROWS):
            yield self.read(begin, _CHUNK_ROWS)


class StepBuffer(EventBuffer):
    """The events of each step of each rank; a rank's steps are disjoint and in order."""

    def __init__(
        self,
        events: EventBuffer,
        rank_of_thread: npt.NDArray[np.int64],
        steps: Mapping[int, Intervals],
    ) -> None:
        super().__init__(EVENT)
        self._runs: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for chunk in events.chunks():
            ranks = rank_of_thread[chunk["thread"]]
            for rank in np.unique(ranks).tolist():
                if rank in steps:
                    self._divide(chunk[ranks == rank], rank, steps[rank])

    def read_step(self, rank: int, step: int) -> EventTable:
        """Returns the events that overlap a step."""
        runs = [self.read(*run) for run in self._runs.get((rank, step), [])]
        return np.concatenate([np.empty(0, dtype=EVENT), *runs])

    def _divide(self, events: EventTable, rank: int, steps: Intervals) -> None:
        first = np.searchsorted(steps[:, 1], events["start"], side="right")
        # Treat an event of zero length as 1 ns long, so that it falls in the step at its start.
        reach = np.maximum(events["end"], events["start"] + 1)
        last = np.searchsorted(steps[:, 0], reach, side="left") - 1
        counts = np.clip(last - first + 1, 0, _MAX_STEPS_OF_EVENT)
        copies = np.repeat(events, counts)
        offsets = np.arange(copies.size) - np.repeat(np.cumsum(counts) - counts, counts)
        numbers = np.repeat(first, counts) + offsets
        order = np.argsort(numbers, kind="stable")
        begin = self.append(copies[order])
        present, run_lengths = np.unique(numbers, return_counts=True)
        for step, length in zip(present.tolist(), run_lengths.tolist(), strict=True):
            self._runs.setdefault((rank, step), []).append((begin, length))
            begin += length
