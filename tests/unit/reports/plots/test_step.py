"""Tests that the figure of a step's time by kind of work shows all of the time."""

import pytest
from matplotlib.axes import Axes

from paceline.reports.plots.step import plot_work
from tests.unit.record_factory import TRAIN, Ranges, operator_rows, profile_environment


def drawn(ranges: Ranges, title: str) -> Axes:
    rows = operator_rows(ranges, "s", profile_environment())
    (axes,) = plot_work([row for row in rows if row.case["operator"] == "all"], title).axes
    return axes


def test_a_bar_for_every_phase_is_divided_by_kind_of_work() -> None:
    axes = drawn(TRAIN, "a$b$")
    phases = [label.get_text() for label in axes.get_yticklabels()]
    assert phases == ["forward", "backward", "optimizer"]
    bars = {str(bars.get_label()): bars for bars in axes.containers}
    assert [bar.get_width() for bar in bars["matmul"]] == pytest.approx([600, 1200, 0])
    assert [bar.get_x() for bar in bars["matmul"]] == pytest.approx([400, 800, 1000])
    assert axes.get_xlabel() == "own time of operators (ms)"
    assert axes.get_title() == "a$b$"
    assert not axes.title.get_parse_math()
    # Small kinds of work share one colour.
    forward = {(f"work {number}", "x"): (10.0 - number, 1.0, 0.0) for number in range(9)}
    containers = drawn({"forward": forward}, "s").containers
    widths = {str(bars.get_label()): bars[0].get_width() for bars in containers}
    assert list(widths) == [*(f"work {number}" for number in range(5)), "the rest"]
    assert sum(widths.values()) == pytest.approx(1e3 * sum(row[0] for row in forward.values()))
