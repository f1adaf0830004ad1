"""Progress of a run, computed from its rows in bounded memory."""

import collections
import itertools
import math
import statistics
from collections.abc import Sequence

from paceline.core.plan import Estimate
from paceline.training.metrics.expectation import Expectation
from paceline.training.metrics.rows import STARTED, EvaluationRow, EventRow, MetricsRow, StepRow

_RECENT_STEPS = 100
_SMOOTHED_STEPS = 20
_FEWEST_STEPS = 8
"""Minimum number of steps for a reliable spread or trend."""
_STANDARD_ERRORS = 2.0
_EVENTS = 4


class Progress:
    """Tracks the progress of a run.

    Args:
        expected: Predictions and limits of the run.
    """

    def __init__(self, expected: Expectation) -> None:
        self.expected = expected
        self.step = 0
        self.losses = History()
        self.evaluation: EvaluationRow | None = None
        self.events: collections.deque[EventRow] = collections.deque(maxlen=_EVENTS)
        self.memory_bytes: int | None = None
        self.last: StepRow | None = None
        self._recent: collections.deque[StepRow] = collections.deque(maxlen=_RECENT_STEPS)
        self._is_first = True

    def note(self, row: MetricsRow) -> None:
        """Processes a row."""
        self.step = row.step
        if isinstance(row, EventRow):
            self.events.append(row)
            self._is_first = self._is_first or row.name == STARTED
        elif isinstance(row, EvaluationRow):
            self.evaluation = row
        else:
            self._note_step(row)

    def _note_step(self, row: StepRow) -> None:
        self.last = row
        self.losses.append(row.loss)
        if row.memory_bytes is not None:
            self.memory_bytes = row.memory_bytes
        # The first step of an attempt warms up, so its time is not representative.
        if not self._is_first:
            self._recent.append(row)
        self._is_first = False

    @property
    def loss(self) -> float | None:
        """Mean loss of the last steps: a single loss is mostly noise."""
        losses = [row.loss for row in self._recent][-_SMOOTHED_STEPS:]
        if losses:
            return statistics.fmean(losses)
        return None if self.last is None else self.last.loss

    @property
    def trend(self) -> tuple[float, int] | None:
        """Relative change of the loss, 0 if within noise, and the number of steps it took."""
        half = len(self._recent) // 2
        if half < _FEWEST_STEPS:
            return None
        losses = [row.loss for row in self._recent]
        before, after = losses[-2 * half : -half], losses[-half:]
        change = statistics.fmean(after) - statistics.fmean(before)
        noise = math.sqrt((statistics.variance(before) + statistics.variance(after)) / half)
        if abs(change) < _STANDARD_ERRORS * noise:
            return 0.0, half
        return change / statistics.fmean(before), half

    @property
    def step_time(self) -> Estimate | None:
        """Median of the last step times, with the interval from the 10th to the 90th percentile."""
        times = [row.step_time_s for row in self._recent]
        if not times:
            return None
        if len(times) < _FEWEST_STEPS:
            return Estimate(value=statistics.median(times))
        tenths = statistics.quantiles(times, n=10, method="inclusive")
        return Estimate(value=statistics.median(times), low=tenths[0], high=tenths[-1])

    @property
    def data_wait_s(self) -> float | None:
        """Median data wait of the last steps."""
        return statistics.median(row.data_wait_s for row in self._recent) if self._recent else None

    @property
    def exposed_communication_s(self) -> float | None:
        """Median exposed communication of the last steps that were sampled."""
        waits = [row.exposed_communication_s for row in self._recent]
        known = [wait_s for wait_s in waits if wait_s is not None]
        return statistics.median(known) if known else None

    @property
    def left(self) -> Estimate | None:
        """Seconds to the last step, with a 95% interval if future steps behave like the last ones.

        The mean of the last steps is itself uncertain, and every future step adds its own
        deviation.
        """
        times = [row.step_time_s for row in self._recent]
        if not times:
            return None
        remaining = self.expected.num_steps - self.step
        value = remaining * statistics.fmean(times)
        if len(times) < _FEWEST_STEPS:
            return Estimate(value=value)
        error = math.sqrt(remaining**2 / len(times) + remaining) * statistics.stdev(times)
        either_way = _STANDARD_ERRORS * error
        return Estimate(value=value, low=max(0.0, value - either_way), high=value + either_way)


class History:
    """Losses of a run, in a bounded number of means over equally many steps.

    Args:
        most: Number of means at which neighbors are merged in pairs.
    """

    def __init__(self, most: int = 128) -> None:
        self._most = most
        self._per_mean = 1
        self._means: list[float] = []
        self._pending: list[float] = []

    def append(self, value: float) -> None:
        """Adds a step's loss."""
        self._pending.append(value)
        if len(self._pending) < self._per_mean:
            return
        self._means.append(statistics.fmean(self._pending))
        self._pending.clear()
        if len(self._means) == self._most:
            self._means = _joined(self._means, self._most // 2)
            self._per_mean *= 2

    def points(self, number: int) -> list[float]:
        """Returns the course of the losses in at most `number` points."""
        return _joined(self._means, min(number, len(self._means)))


def _joined(values: Sequence[float], number: int) -> list[float]:
    """Returns the means of `number` groups of neighbors, as equal in size as possible."""
    borders = [index * len(values) // number for index in range(number + 1)] if number else [0]
    return [statistics.fmean(values[begin:end]) for begin, end in itertools.pairwise(borders)]
