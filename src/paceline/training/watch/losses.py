"""Whether a loss is a spike: far above the last ones, as those vary."""

import collections
import math
import statistics

_STEPS = 100
_FEWEST_STEPS = 20
"""Of which a spread is believed."""
_NORMAL = 1.4826
"""Standard deviations of a normal distribution in a median absolute deviation."""
_LEAST_SPREAD = 0.01
"""Of the median: losses that hardly vary make no spike of a ripple."""


class RecentLosses:
    """The losses of the last steps that were taken.

    Args:
        threshold: How many standard deviations above their median a spike begins.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._losses: collections.deque[float] = collections.deque(maxlen=_STEPS)

    def add(self, loss: float) -> None:
        """Takes the loss of a step that was taken."""
        self._losses.append(loss)

    @property
    def limit(self) -> float:
        """The loss above which there is a spike; infinite while too little is known."""
        if len(self._losses) < _FEWEST_STEPS:
            return math.inf
        median = statistics.median(self._losses)
        deviation = _NORMAL * statistics.median(abs(loss - median) for loss in self._losses)
        return median + self._threshold * max(deviation, _LEAST_SPREAD * abs(median))
