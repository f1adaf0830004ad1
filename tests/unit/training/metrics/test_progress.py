"""Tests of a run's progress: trend, spread and time left."""

import math
import random

import pytest

from paceline.training.panel import History, Progress
from tests.unit.training.metrics.row_factory import expectation, started, step_row


def _after(losses: list[float], times: list[float] | None = None) -> Progress:
    progress = Progress(expectation(num_steps=1000))
    progress.log(started())
    for step, loss in enumerate(losses, start=1):
        time_s = 0.5 if times is None else times[step - 1]
        progress.log(step_row(step, loss=loss, step_time_s=time_s))
    return progress


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
    progress = _after([4.0, 4.0, 4.0], [9.0, 0.5, 0.5])
    assert progress.step_time is not None
    assert progress.step_time.value == 0.5
    progress.log(started(2))
    progress.log(step_row(3, step_time_s=9.0))
    assert progress.left is not None
    assert progress.left.value == 997 * 0.5
    assert progress.left.low is None


def test_the_interval_of_the_time_left_holds_it_nearly_always() -> None:
    source = random.Random(1)
    held = 0
    for _ in range(200):
        times = [math.exp(source.gauss(0, 0.3)) for _ in range(1000)]
        progress = _after([4.0] * 100, times)
        left = progress.left
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
