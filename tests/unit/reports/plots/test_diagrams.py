"""Tests of explanatory diagrams: which tiles are computed, and when buckets are sent."""

import collections

import pytest

from paceline.reports.plots.attention import plot_tiles
from paceline.reports.plots.strategies import plot_designs


def test_tiles_on_the_diagonal_are_masked_and_buckets_sent_when_they_are_complete() -> None:
    colors = collections.Counter(tile.get_facecolor() for tile in plot_tiles().axes[0].patches)
    # Of 8 x 8 tiles: those on the diagonal, below and above.
    assert sorted(colors.values()) == [8, 28, 28]
    # Buckets of one, two, two, two and one layers; the last waits for the previous message.
    messages = plot_designs().axes[3].patches[8:]
    assert [bar.get_x() for bar in messages] == pytest.approx([1, 3, 5, 7, 8.6])
