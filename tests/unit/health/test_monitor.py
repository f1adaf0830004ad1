"""Tests of loss spikes: far above recent losses, relative to their spread."""

import math

from paceline.health.monitor import RecentLosses


def test_a_few_losses_make_no_limit() -> None:
    losses = RecentLosses(10)
    for number in range(19):
        losses.add(5.0 + number % 2)
    assert losses.limit == math.inf


def test_the_limit_follows_the_spread_and_not_the_outliers() -> None:
    losses = RecentLosses(10)
    for number in range(100):
        losses.add(3.0 + 0.1 * (number % 3))
    limit = losses.limit
    assert 4.0 < limit < 5.0
    losses.add(1e6)
    assert losses.limit == limit


def test_equal_losses_make_no_spike_of_a_ripple() -> None:
    losses = RecentLosses(10)
    for _ in range(50):
        losses.add(2.0)
    assert losses.limit == 2.2
