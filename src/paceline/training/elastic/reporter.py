"""Reports the steps of an elastic run, from the first member of each step.

All replicas have the same results of a step. A replica that becomes the first opens the run's
metrics, and adds the rows that a lost one did not write.
"""

import collections
import pathlib
from collections.abc import Callable

from paceline.training.metrics import STARTED, EventRow, MetricsFile, MetricsRow, StepRow
from paceline.training.observers import Observer

_KEPT_ROWS = 64
"""Number of step rows that a replica keeps in case it has to write them."""


class Reporter:
    """Writes rows while this replica is the first, and keeps the newest ones otherwise.

    Args:
        metrics: The run's metrics file.
        open_observer: Creates the observer of the run.
    """

    def __init__(self, metrics: pathlib.Path, open_observer: Callable[[], Observer]) -> None:
        self._metrics = metrics
        self._open_observer = open_observer
        self._observer: Observer | None = None
        self._kept: collections.deque[StepRow] = collections.deque(maxlen=_KEPT_ROWS)

    def lead(self, is_first: bool, step: int, message: str) -> None:
        """Starts or stops reporting, depending on the members of a step.

        Args:
            is_first: Whether this replica is the first of the members.
            step: Number of completed steps.
            message: Message of the start event.
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
        """Keeps a step row, and reports any row if this replica is the first."""
        if isinstance(row, StepRow):
            self._kept.append(row)
        if self._observer is not None:
            self._observer.note(row)

    def close(self) -> None:
        """Closes the observer, if it is open."""
        if self._observer is not None:
            self._observer.close()
            self._observer = None


def _last_step(metrics: pathlib.Path) -> int:
    rows = MetricsFile(metrics).read() if metrics.exists() else ()
    return max((row.step for row in rows if isinstance(row, StepRow)), default=0)
