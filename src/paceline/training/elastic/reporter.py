"""Who reports the steps of a run whose replicas come and go: the first of those that take part.

All replicas know the same of a step. One that becomes the first opens the run's metrics and adds
the rows that a lost one has not written any more.
"""

import collections
import pathlib
from collections.abc import Callable

from paceline.training.metrics.observers import Observer
from paceline.training.metrics.rows import STARTED, EventRow, MetricsFile, MetricsRow, StepRow

_KEPT_ROWS = 64
"""Steps whose rows a replica keeps for the case that it has to write them."""


class Reporter:
    """Writes rows while this replica is the first, and keeps the newest ones otherwise.

    Args:
        metrics: The run's file of rows.
        open_observer: Makes those who follow the run.
    """

    def __init__(self, metrics: pathlib.Path, open_observer: Callable[[], Observer]) -> None:
        self._metrics = metrics
        self._open_observer = open_observer
        self._observer: Observer | None = None
        self._kept: collections.deque[StepRow] = collections.deque(maxlen=_KEPT_ROWS)

    def lead(self, is_first: bool, step: int, message: str) -> None:
        """Takes over, or lets go, as the members of a step say.

        Args:
            is_first: Whether this replica is the first of those that take part.
            step: Steps that are done.
            message: What to say of the start.
        """
        if is_first == (self._observer is not None):
            return
        if not is_first:
            self.close()
            return
        self._observer = self._open_observer()
        self._observer.note(EventRow(step=step, name=STARTED, message=message))
        written = _last_step(self._metrics)
        for row in self._kept:
            if written < row.step <= step:
                self._observer.note(row)

    @property
    def is_open(self) -> bool:
        """Whether this replica reports."""
        return self._observer is not None

    def note(self, row: MetricsRow) -> None:
        """Reports a row, or keeps it."""
        if isinstance(row, StepRow):
            self._kept.append(row)
        if self._observer is not None:
            self._observer.note(row)

    def close(self) -> None:
        """Lets those who follow the run finish."""
        if self._observer is not None:
            self._observer.close()
            self._observer = None


def _last_step(metrics: pathlib.Path) -> int:
    rows = MetricsFile(metrics).read() if metrics.exists() else ()
    return max((row.step for row in rows if isinstance(row, StepRow)), default=0)
