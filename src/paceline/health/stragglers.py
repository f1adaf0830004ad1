"""Finds stragglers: ranks whose own work takes longer than that of the others.

Ranks that wait for a slow rank have the same step time as it; only the time spent not waiting
distinguishes them. In every step, each rank adds a one to the bin of its own time (the median of
its last steps), in the all-reduce that the step makes anyway. The result is a histogram over all
ranks, whose size does not depend on the world size. Only if it shows an outlier for several steps
do ranks exchange their times, to name the straggler.
"""

import collections
import math
import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist

from paceline.core.units import format_seconds
from paceline.parallel.ranks.collectives import all_gather_single

_FACTOR = 1.3
"""Multiple of the median time above which a rank is a straggler."""
_LEAST_EXCESS_S = 0.005
_STEPS = 7
"""Number of steps whose median is a rank's time."""
_LOOKS = 3
"""Consecutive steps with an outlier before ranks exchange their times."""
_PAUSE_STEPS = 100
"""Steps before the same rank is reported again."""
_STOPPED_S = 1.0
_SMALLEST_S = 1e-4
_BIN = 1.15
"""Ratio of a bin's upper bound to its lower bound."""
_NUM_BINS = 96


class Stragglers:
    """Tracks the ranks' own times; every rank creates one and makes the same calls."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: collections.deque[float] = collections.deque(maxlen=_STEPS)
        self._stopped_s = 0.0
        self._num_looks = 0
        self._was_stopped = False
        self._quiet: dict[int, int] = {}
        """Step until which each rank is not reported again."""

    def notes(self, own_s: float, stopped_s: float) -> Sequence[float]:
        """Returns this rank's part of the histogram, and whether it was stopped.

        `own_s` is its time in this step without waiting for messages, `stopped_s` how long its
        process was stopped since the last step.
        """
        self._stopped_s = max(stopped_s, own_s - self._median_s() if self._times else 0.0)
        self._times.append(own_s)
        bins = [0.0] * _NUM_BINS
        if len(self._times) == _STEPS:
            bins[_bin_of(self._median_s())] = 1.0
        return (*bins, float(self._stopped_s > _STOPPED_S))

    def consider(self, sums: Sequence[float]) -> None:
        """Processes the sums of all ranks' notes."""
        *bins, num_stopped = sums
        self._was_stopped = num_stopped > 0
        self._num_looks = self._num_looks + 1 if _has_outlier(bins) else 0

    def find(self, step: int) -> list[str]:
        """Returns messages about slow or stopped ranks, if the last sums show any.

        All ranks must call it, and get the same messages.
        """
        if not self._was_stopped and self._num_looks < _LOOKS:
            return []
        has_looked = self._num_looks >= _LOOKS
        self._num_looks = 0
        times = self._of_each_rank(self._median_s())
        stopped = self._of_each_rank(self._stopped_s)
        found = [
            f"rank {rank} was stopped for {format_seconds(seconds)}"
            for rank, seconds in enumerate(stopped)
            if seconds > _STOPPED_S
        ]
        if not found and has_looked:
            found = self._name(step, times)
        return found

    def _name(self, step: int, times: Sequence[float]) -> list[str]:
        usual_s = statistics.median_low(times)
        least_s = max(_FACTOR * usual_s, usual_s + _LEAST_EXCESS_S)
        slow = [
            rank
            for rank, own_s in enumerate(times)
            if own_s > least_s and self._quiet.get(rank, 0) <= step
        ]
        self._quiet |= dict.fromkeys(slow, step + _PAUSE_STEPS)
        return [
            f"rank {rank} takes {format_seconds(times[rank])} per step without waiting, "
            f"{times[rank] / usual_s:.2f} times the median {format_seconds(usual_s)}; the fastest "
            f"is rank {times.index(min(times))} with {format_seconds(min(times))}"
            for rank in slow
        ]

    def _median_s(self) -> float:
        return statistics.median(self._times)

    def _of_each_rank(self, number: float) -> list[float]:
        own = torch.tensor([number], dtype=torch.float64, device=self._device)
        gathered = own.new_empty(dist.get_world_size())
        all_gather_single(gathered, own)
        values: list[float] = gathered.tolist()
        return values


def _bin_of(seconds: float) -> int:
    index = math.log(max(seconds, _SMALLEST_S) / _SMALLEST_S, _BIN)
    return min(int(index), _NUM_BINS - 1)


def _has_outlier(bins: Sequence[float]) -> bool:
    """Returns whether the slowest bin may be more than the factor above the median's bin."""
    filled = [number for number, count in enumerate(bins) if count]
    if len(filled) < 2:
        return False
    half, seen = sum(bins) / 2, 0.0
    for number in filled:
        seen += bins[number]
        if seen >= half:  # With two ranks, the lower one is the median.
            return _BIN ** (filled[-1] - number + 1) > _FACTOR
    return False
