"""Terminal panel of a run, redrawn while it trains and left in place when it ends."""

import collections
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence

from rich.box import ROUNDED
from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.core.plan import Estimate
from paceline.core.units import format_binary_bytes, format_decimal, format_duration, format_seconds
from paceline.records.schema import with_interval
from paceline.training.forecast import Forecast
from paceline.training.metrics import STARTED, EvaluationRow, EventRow, MetricsRow, StepRow
from paceline.training.observers import Observer

_RECENT_STEPS = 100
_SMOOTHED_STEPS = 20
_FEWEST_STEPS = 8
"""Minimum number of steps for a reliable spread or trend."""
_STANDARD_ERRORS = 2.0
_EVENTS = 4


class RunPanel:
    """Shows a run: what its rows say, computed in bounded memory, one line per quantity."""

    def __init__(self, name: str, expected: Forecast) -> None:
        self._name = name
        self.expected = expected
        self.step = 0
        self.losses = History()
        self.evaluation: EvaluationRow | None = None
        self.events: collections.deque[EventRow] = collections.deque(maxlen=_EVENTS)
        self.memory_bytes: int | None = None
        self.last: StepRow | None = None
        self._recent: collections.deque[StepRow] = collections.deque(maxlen=_RECENT_STEPS)
        self._is_first = True

    def log(self, row: MetricsRow) -> None:
        """Processes a row."""
        self.step = row.step
        if isinstance(row, EventRow):
            self.events.append(row)
            self._is_first = self._is_first or row.name == STARTED
        elif isinstance(row, EvaluationRow):
            self.evaluation = row
        else:
            self._log_step(row)

    def _log_step(self, row: StepRow) -> None:
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

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Renders one line per known quantity, and the last events below."""
        lines = Table.grid(padding=(0, 2))
        lines.add_column(style="bold", no_wrap=True)
        lines.add_column(overflow="fold")
        lines.add_row("", ProgressBar(total=self.expected.num_steps, completed=self.step))
        texts = {
            "loss": _loss(self, has_blocks=not options.ascii_only),
            "held-out": _held_out(self),
            "update": _update(self),
            "speed": _speed(self),
            "step": _step_time(self),
            "waits": _waits(self),
            "memory": _memory(self),
            "left": _left(self),
            "sample": _sample(self),
        }
        for label, text in texts.items():
            if text:
                lines.add_row(label, Text(text))
        for number, event in enumerate(self.events):
            said = Text(f"{event.name} {event.message}", style="dim")
            lines.add_row("" if number else "events", said)
        yield Panel(
            lines,
            box=ROUNDED,
            title=Text(f"{self._name}: step {self.step:,} of {self.expected.num_steps:,}"),
            title_align="left",
            width=min(options.max_width, _WIDEST),
        )


class History:
    """Losses of a run, in a bounded number of means over equally many steps."""

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


_SHARE = 0.01
"""Maximum fraction of time for drawing: rank 0 also trains, and other ranks wait for it."""
_LONGEST_PAUSE_S = 2.0
"""Maximum pause between drawings: the first drawing is the slowest, and its pause the longest."""
_WIDEST = 100
_SPARK = "▁▂▃▄▅▆▇█"
_SPARK_POINTS = 24
_SAMPLE_CHARACTERS = 120


class PanelObserver(Observer):
    """Draws a run."""

    def __init__(self, name: str, expected: Forecast, console: Console) -> None:
        self._panel = RunPanel(name, expected)
        self._next_s = 0.0
        # Drawn only when a row arrives: a refresh thread would take time from training.
        self._live = Live(console=console, auto_refresh=False)

    def log(self, row: MetricsRow) -> None:
        """Processes a row, and redraws unless that would take too much time."""
        self._panel.log(row)
        if not self._live.is_started:
            self._live.start()
        if not isinstance(row, StepRow) or time.monotonic() >= self._next_s:
            self._draw()

    def close(self) -> None:
        """Draws the final state, below which the terminal continues."""
        if self._live.is_started:
            self._draw()
            self._live.stop()

    def _draw(self) -> None:
        began = time.monotonic()
        self._live.update(self._panel, refresh=True)
        ended = time.monotonic()
        self._next_s = ended + min((ended - began) / _SHARE, _LONGEST_PAUSE_S)


def _loss(run: RunPanel, *, has_blocks: bool) -> str:
    if run.loss is None:
        return ""
    parts = [f"{run.loss:.4f}"]
    if run.trend is not None:
        change, steps = run.trend
        direction = f"{'falling' if change < 0 else 'rising'} {abs(change):.2%}"
        parts.append(f"{direction if change else 'level'} in {steps} steps")
    if (final := run.expected.final_loss) is not None:
        parts.append(f"predicted at the end {with_interval(final, '{:.4f}'.format)}")
    if has_blocks:
        parts.append(sparkline(run.losses.points(_SPARK_POINTS)))
    return "  ".join(parts)


def _update(run: RunPanel) -> str:
    if run.last is None:
        return ""
    norm, rate = run.last.gradient_norm, run.last.learning_rate
    return f"norm of the gradients {norm:.3g}, learning rate {rate:.3g}"


def _held_out(run: RunPanel) -> str:
    row = run.evaluation
    if row is None:
        return ""
    return f"{row.loss:.4f}, {row.bits_per_byte:.4f} bits per byte, at step {row.step:,}"


def _speed(run: RunPanel) -> str:
    if run.step_time is None:
        return ""
    step_time_s = run.step_time.value
    text = format_decimal(run.expected.tokens_per_s(step_time_s), "tokens/s")
    utilization = run.expected.utilization(step_time_s)
    return text if utilization is None else f"{text}, MFU {utilization:.1%}"


def _step_time(run: RunPanel) -> str:
    measured, predicted = run.step_time, run.expected.step_time
    if measured is None:
        return ""
    text = with_interval(measured, format_seconds)
    if predicted is None:
        return text
    error = measured.value / predicted.value - 1
    return f"{text}; predicted {with_interval(predicted, format_seconds)}, measured {error:+.0%}"


def _waits(run: RunPanel) -> str:
    if run.step_time is None or run.data_wait_s is None:
        return ""
    waits = {"data": run.data_wait_s, "exposed communication": run.exposed_communication_s}
    return ", ".join(
        f"{name} {format_seconds(wait_s)} ({wait_s / run.step_time.value:.1%})"
        for name, wait_s in waits.items()
        if wait_s is not None
    )


def _memory(run: RunPanel) -> str:
    if run.memory_bytes is None:
        return ""
    text, limit = format_binary_bytes(run.memory_bytes), run.expected.memory_limit_bytes
    if limit is not None:
        text += f" of {format_binary_bytes(limit)} ({run.memory_bytes / limit:.0%})"
    tensors, process = run.expected.memory_bytes, run.expected.process_memory
    if process is not None:
        return f"{text}; predicted {with_interval(process, format_binary_bytes)}"
    return text if tensors is None else f"{text}; tensors predicted {format_binary_bytes(tensors)}"


def _left(run: RunPanel) -> str:
    if run.left is None or run.step >= run.expected.num_steps:
        return ""
    return with_interval(run.left, format_duration)


def _sample(run: RunPanel) -> str:
    row = run.evaluation
    return "" if row is None or row.sample is None else repr(row.sample[:_SAMPLE_CHARACTERS])


def sparkline(values: Sequence[float]) -> str:
    """Draws values as blocks; the highest fifth of them get the top block.

    Losses fall fast at first: if the first one were the top, all others would be at the bottom.
    """
    if not values:
        return ""
    low, high = min(values), sorted(values)[-1 - len(values) // 5]
    if low == high:
        return _SPARK[0] * len(values)
    top = len(_SPARK) - 1
    heights = [min(1.0, (value - low) / (high - low)) for value in values]
    return "".join(_SPARK[round(height * top)] for height in heights)
