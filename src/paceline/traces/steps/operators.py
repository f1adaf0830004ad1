"""Time, calls and FLOPs by operator, inside each named range."""

import dataclasses

import numpy as np
import numpy.typing as npt

from paceline.core.ranges import WAIT, is_bucket_range, short_name, step_label
from paceline.traces.events import intervals
from paceline.traces.events.catalog import PROFILER_STEP, Catalog, EventTable
from paceline.traces.events.op_classes import OpClass
from paceline.traces.steps.self_time import SelfTimes

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
        self._totals: dict[tuple[str, int], tuple[int, int]] = {}
        self._range_names: set[str] = set()

    def add(self, work: SelfTimes, ranges: EventTable) -> None:
        """Adds a step."""
        self._add(EVERYWHERE, work, np.ones(work.keys.size, dtype=np.bool_))
        for key in np.unique(ranges["key"]).tolist():
            name = self._catalog.keys[key].name
            if not self._is_wanted(name):
                continue
            chosen = ranges[ranges["key"] == key]
            inside = intervals.union(chosen["start"], chosen["end"])
            if inside.size:
                index = np.searchsorted(inside[:, 0], work.starts, side="right") - 1
                inside_range = (index >= 0) & (work.starts < inside[index, 1])
                self._add(short_name(name), work, inside_range)

    def rows(self) -> tuple[OperatorTime, ...]:
        """Returns the totals by range and operator, the longest first within a range."""
        sums: dict[tuple[str, str], list[int]] = {}
        op_classes: dict[str, OpClass] = {}
        for (range_name, number), (num_calls, own) in self._totals.items():
            key = self._catalog.keys[number]
            op_classes[key.name] = key.op_class
            total = sums.setdefault((range_name, key.name), [0, 0, 0])
            for column, value in enumerate((num_calls, own, num_calls * key.flops)):
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

    def _add(self, range_name: str, work: SelfTimes, chosen: npt.NDArray[np.bool_]) -> None:
        keys, row = np.unique(work.keys[chosen], return_inverse=True)
        calls = np.bincount(row, work.begins_here[chosen], keys.size).astype(np.int64)
        own = np.zeros(keys.size, dtype=np.int64)
        np.add.at(own, row, work.self_time[chosen])
        for key, num_calls, nanoseconds in zip(
            keys.tolist(), calls.tolist(), own.tolist(), strict=True
        ):
            before = self._totals.get((range_name, key), (0, 0))
            self._totals[range_name, key] = (before[0] + num_calls, before[1] + nanoseconds)
