"""Which rank holds up the others: the one whose own work takes longer than theirs.

Ranks that wait for a slow one take as long as it does; what tells them apart is the time in which
they do not wait. Each step, every rank puts a one into the bin of its own time (the median of its
last steps) in the message that the step sends anyway: a histogram over all ranks, whose size does
not depend on their number. Only when it shows an outlier for several steps do ranks exchange their
times, and one is named.
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
"""A rank that takes so many times the median is a straggler."""
_LEAST_EXCESS_S = 0.005
_STEPS = 7
"""Steps whose median is a rank's time."""
_LOOKS = 3
"""Steps in a row in which there must be an outlier."""
_PAUSE_STEPS = 100
"""Steps after which the same rank is named again."""
_STOPPED_S = 1.0
_SMALLEST_S = 1e-4
_BIN = 1.15
"""Ratio of a bin's end to its beginning."""
_NUM_BINS = 96


class Stragglers:
    """Follows the ranks' own times; all ranks make one and call it alike.

    Args:
        device: Where this rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: collections.deque[float] = collections.deque(maxlen=_STEPS)
        self._stopped_s = 0.0
        self._num_looks = 0
        self._was_stopped = False
        self._quiet: dict[int, int] = {}
        """The step until which a rank is not named again."""

    def notes(self, own_s: float, stopped_s: float) -> Sequence[float]:
        """Returns this rank's part of the histogram, and whether it was stopped.

        Args:
            own_s: Its time of this step, without waiting for messages.
            stopped_s: For how long its process was stopped since the last step.
        """
        self._stopped_s = max(stopped_s, own_s - self._median_s() if self._times else 0.0)
        self._times.append(own_s)
        bins = [0.0] * _NUM_BINS
        if len(self._times) == _STEPS:
            bins[_bin_of(self._median_s())] = 1.0
        return (*bins, float(self._stopped_s > _STOPPED_S))

    def consider(self, sums: Sequence[float]) -> None:
        """Takes what all ranks have noted."""
        *bins, num_stopped = sums
        self._was_stopped = num_stopped > 0
        self._num_looks = self._num_looks + 1 if _has_outlier(bins) else 0

    def find(self, step: int) -> list[str]:
        """Returns what is to be said of ranks, where there is reason to ask them.

        All ranks call it, and get the same.

        Args:
            step: Steps that are done.
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
    place = math.log(max(seconds, _SMALLEST_S) / _SMALLEST_S, _BIN)
    return min(int(place), _NUM_BINS - 1)


def _has_outlier(bins: Sequence[float]) -> bool:
    """Whether the slowest bin may be more than the factor above the one of the median."""
    filled = [number for number, count in enumerate(bins) if count]
    if len(filled) < 2:
        return False
    half, seen = sum(bins) / 2, 0.0
    for number in filled:
        seen += bins[number]
        if seen >= half:  # The lower one of two ranks.
            return _BIN ** (filled[-1] - number + 1) > _FACTOR
    return False
