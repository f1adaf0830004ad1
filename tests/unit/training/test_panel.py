"""Tests of the terminal panel and of the quantities that it shows."""

import io
import math
import random
from typing import Any

import pytest
from rich.console import Console

from paceline.training.panel import History, PanelObserver, RunPanel, sparkline
from tests.unit.training.row_factory import (
    CORRECTED,
    evaluation_row,
    expectation,
    started,
    step_row,
)


def _shown(width: int = 80, encoding: str = "utf-8", **known: Any) -> str:
    """Returns the terminal output after 40 of 100 steps."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, force_terminal=True, width=width, color_system=None)
    panel = PanelObserver("run", expectation(**known), console)
    panel.log(started())
    for step in range(1, 41):
        panel.log(step_row(step, exposed_communication_s=0.05, memory_bytes=2**29))
    panel.log(evaluation_row(40))
    panel.close()
    file.flush()
    drawn = file.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    return drawn[drawn.rindex("run: step") :]


def test_everything_that_is_known_is_shown() -> None:
    shown = _shown(
        step_time_s=0.4, peak_flops_per_s=1e10, memory_limit_bytes=2**30, memory_bytes=2**28
    )
    for text in (
        "run: step 40 of 100",
        "4.6950  falling",
        "norm of the gradients 1.5, learning rate 0.001",
        "held-out  4.5000, 1.2500 bits per byte, at step 40",
        "2 ktokens/s, MFU 20.0%",
        "500 ms (500 ms to 500 ms); predicted 400 ms, measured +25%",
        "data 10 ms (2.0%), exposed communication 50 ms (10.0%)",
        "512.00 MiB of 1.00 GiB (50%); tensors predicted 256.00 MiB",
        "30 s (30 s to 30 s)",
        "started from step 0",
    ):
        assert text in shown, shown


def test_predictions_corrected_by_earlier_runs_have_their_intervals() -> None:
    shown = _shown(width=200, step_time_s=0.4, memory_bytes=2**28, corrected=CORRECTED)
    for text in (
        "; predicted 450 ms (300 ms to 600 ms), measured +11%",
        "512.00 MiB; predicted 512.00 MiB (256.00 MiB to 1.00 GiB)",
    ):
        assert text in shown, shown


def test_what_is_not_known_is_not_shown() -> None:
    shown = _shown()
    assert "MFU" not in shown
    assert "; predicted" not in shown
    assert "512.00 MiB; tensors" in shown


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, _shown(width).splitlines())) <= width


def test_a_terminal_without_blocks_has_none() -> None:
    shown = _shown(encoding="ascii")
    assert "falling" in shown
    assert "step 40 of 100" in shown


def test_a_sparkline_shows_more_than_a_high_beginning() -> None:
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert sparkline([99.0, 3.0, 2.0, 2.0, 1.0]) == "██▅▅▁"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([]) == ""


def _after(losses: list[float], times: list[float] | None = None) -> RunPanel:
    panel = RunPanel("run", expectation(num_steps=1000))
    panel.log(started())
    for step, loss in enumerate(losses, start=1):
        time_s = 0.5 if times is None else times[step - 1]
        panel.log(step_row(step, loss=loss, step_time_s=time_s))
    return panel


def test_a_trend_is_told_from_noise() -> None:
    noise = random.Random(0)
    level = _after([4.0 + noise.gauss(0, 0.1) for _ in range(101)])
    assert level.trend == (0.0, 50)
    falling = _after([4.0 - 0.01 * step + noise.gauss(0, 0.1) for step in range(101)])
    assert falling.trend is not None
    change, steps = falling.trend
    assert steps == 50
    assert change == pytest.approx(-0.5 / 3.74, abs=0.02)
    assert _after([4.0] * 10).trend is None


def test_the_first_step_of_an_attempt_does_not_count() -> None:
    panel = _after([4.0, 4.0, 4.0], [9.0, 0.5, 0.5])
    assert panel.step_time is not None
    assert panel.step_time.value == 0.5
    panel.log(started(2))
    panel.log(step_row(3, step_time_s=9.0))
    assert panel.left is not None
    assert panel.left.value == 997 * 0.5
    assert panel.left.low is None


def test_the_interval_of_the_time_left_holds_it_nearly_always() -> None:
    source = random.Random(1)
    held = 0
    for _ in range(200):
        times = [math.exp(source.gauss(0, 0.3)) for _ in range(1000)]
        panel = _after([4.0] * 100, times)
        left = panel.left
        assert left is not None
        assert left.low is not None
        assert left.high is not None
        held += left.low <= sum(times[100:]) <= left.high
    assert held >= 180


def test_a_history_is_bounded_and_keeps_its_course() -> None:
    history = History(most=8)
    assert history.points(4) == []
    for number in range(1000):
        history.append(float(number))
    points = history.points(4)
    assert len(points) == 4
    assert points == sorted(points)
    assert points[0] == pytest.approx(125, abs=70)
    assert len(history.points(100)) < 8
