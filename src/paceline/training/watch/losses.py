"""Detects loss spikes: losses far above recent ones, relative to their spread."""

import collections
import math
import statistics

_STEPS = 100
_FEWEST_STEPS = 20
"""Minimum number of losses for a reliable spread."""
_NORMAL = 1.4826
"""Ratio of standard deviation to median absolute deviation in a normal distribution."""
_LEAST_SPREAD = 0.01
"""Minimum spread as a fraction of the median, so that ripples of a flat loss are not spikes."""


class RecentLosses:
    """Losses of the most recent applied steps.

    Args:
        threshold: Standard deviations above the median at which a spike begins.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._losses: collections.deque[float] = collections.deque(maxlen=_STEPS)

    def add(self, loss: float) -> None:
        """Adds the loss of an applied step."""
        self._losses.append(loss)

    @property
    def limit(self) -> float:
        """Loss above which a step is a spike; infinite until enough losses are known."""
        if len(self._losses) < _FEWEST_STEPS:
            return math.inf
        median = statistics.median(self._losses)
        deviation = _NORMAL * statistics.median(abs(loss - median) for loss in self._losses)
        return median + self._threshold * max(deviation, _LEAST_SPREAD * abs(median))
