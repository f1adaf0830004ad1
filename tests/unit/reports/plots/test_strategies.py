import pytest

from paceline.reports.plots.strategies import plot_designs


def test_buckets_of_the_diagram_are_sent_when_they_are_complete() -> None:
    # Buckets of one, two, two, two and one layers; the last waits for the previous message.
    messages = plot_designs().axes[3].patches[8:]
    assert [bar.get_x() for bar in messages] == pytest.approx([1, 3, 5, 7, 8.6])
