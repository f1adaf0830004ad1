"""Who is told what happens in a run: the file of metrics, a log, trackers.

An observer that fails must not end a run of days: it is named once, and not told any more.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.core.units import format_decimal, format_seconds
from paceline.training.metrics.rows import (
    STARTED,
    EvaluationRow,
    EventRow,
    MetricsFile,
    MetricsRow,
    StepRow,
)


class Observer(Protocol):
    """Is told of every row."""

    def note(self, row: MetricsRow) -> None:
        """Takes a row."""


class FileObserver:
    """Appends every row to the run's metrics.

    Args:
        metrics: The file.
    """

    def __init__(self, metrics: MetricsFile) -> None:
        self._metrics = metrics

    def note(self, row: MetricsRow) -> None:
        """Writes a row; a start forgets what came after the state that it goes on from."""
        if isinstance(row, EventRow) and row.name == STARTED:
            self._metrics.keep_up_to(row.step)
        self._metrics.append(row)


class LogObserver:
    """Prints a line every few steps, and every evaluation and event.

    Args:
        every_steps: Steps between lines.
        num_steps: Steps of the run.
        tokens_per_step: Tokens of all ranks.
        write: Takes a line; stderr by default.
    """

    def __init__(
        self,
        every_steps: int,
        num_steps: int,
        tokens_per_step: int,
        write: Callable[[str], object] = sys.stderr.write,
    ) -> None:
        self._every_steps = every_steps
        self._num_steps = num_steps
        self._tokens_per_step = tokens_per_step
        self._write = write
        self._recent: list[StepRow] = []

    def note(self, row: MetricsRow) -> None:
        """Prints what a row says, where it is due."""
        if isinstance(row, EventRow):
            self._write(f"paceline: {row.name} {row.message}\n")
        elif isinstance(row, EvaluationRow):
            self._write(
                f"step {row.step:,}  held-out loss {row.loss:.4f}, {row.bits_per_byte:.4f} bits "
                "per byte\n"
            )
            if row.sample is not None:
                self._write(f"step {row.step:,}  sample: {row.sample!r}\n")
        else:
            self._recent.append(row)
            if row.step % self._every_steps == 0 or row.step == self._num_steps:
                self._write(self._line())
                self._recent.clear()

    def _line(self) -> str:
        """Returns the mean of the steps since the last line: a single loss is mostly noise."""
        last, number = self._recent[-1], len(self._recent)
        loss = sum(row.loss for row in self._recent) / number
        step_time_s = sum(row.step_time_s for row in self._recent) / number
        left_s = (self._num_steps - last.step) * step_time_s
        return (
            f"step {last.step:,} of {self._num_steps:,}  loss {loss:.4f}  norm "
            f"{last.gradient_norm:.3g}  lr {last.learning_rate:.3g}  "
            f"{format_decimal(self._tokens_per_step / step_time_s, 'tokens/s')}  step "
            f"{format_seconds(step_time_s)}  left {format_seconds(left_s)}\n"
        )


class Observers:
    """Several observers, none of which can end the run.

    Args:
        observers: Those to tell, in order.
        warn: Takes a line about one that has failed.
    """

    def __init__(
        self, observers: Sequence[Observer], warn: Callable[[str], object] = sys.stderr.write
    ) -> None:
        self._observers = list(observers)
        self._warn = warn

    def note(self, row: MetricsRow) -> None:
        """Tells everyone who still listens."""
        for observer in tuple(self._observers):
            try:
                observer.note(row)
            except Exception as error:
                self._observers.remove(observer)
                self._warn(
                    f"paceline: {type(observer).__name__} failed at step {row.step} and is told "
                    f"nothing any more; training goes on: {error}\n"
                )
