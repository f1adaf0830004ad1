"""Predicted steps beside measured ones, in words and as a picture."""

import dataclasses
import itertools
import pathlib

from paceline.core.plan import Estimate
from paceline.prediction.backtest import GROUPS, BacktestCase, HeldOutPrediction
from paceline.reports.plots.backtest import plot_backtest
from paceline.reports.plots.style import save_figure
from paceline.reports.tables.backtest import backtest_table, summary_text


def _held_out(strategy: str, link: str, predicted_s: float) -> HeldOutPrediction:
    """Returns a case of one second, whose interval is a tenth of the prediction."""
    return HeldOutPrediction(
        case=BacktestCase(
            labels={"ranks": "2", "link": link, "strategy": strategy, "model": "small"},
            terms={term: 0.1 for group in GROUPS.values() for term in group},
            measured_s=1.0,
        ),
        predicted=Estimate(value=predicted_s, low=0.9 * predicted_s, high=1.1 * predicted_s),
    )


HELD_OUT = [
    _held_out(strategy, link, predicted_s)
    for (strategy, link), predicted_s in zip(
        itertools.product(("flat", "sharded"), ("loopback", "1 Gbit/s")),
        (1.02, 0.95, 1.05, 1.3),
        strict=True,
    )
]


def test_every_strategy_at_every_place_has_a_row() -> None:
    table = backtest_table([*HELD_OUT, _held_out("flat", "loopback", 0.5)], counted=4)
    assert [row[:3] for row in table.rows] == [
        ("2", "loopback", "flat"),
        ("2", "1 Gbit/s", "flat"),
        ("2", "loopback", "sharded"),
        ("2", "1 Gbit/s", "sharded"),
        ("all", "", ""),
    ]
    assert table.rows[0][3:] == ("2", "1000 to 1000", "26.0%", "-50.0%", "1 of 2")
    # What does not count is shown with its group, but not in the sum.
    assert table.rows[-1][3:] == ("4", "1000 to 1000", "5.0%", "+30.0%", "3 of 4")


def test_groups_are_left_out_together_where_enough_others_are_left() -> None:
    few = backtest_table(HELD_OUT, counted=4)
    assert len(few.notes) == 1
    many = backtest_table(HELD_OUT * 6, counted=24)
    # There is one model only, so without it there would be nothing to learn from.
    assert [note.split(",")[0] for note in many.notes[1:]] == [
        "with all cases of a link left out together"
    ]


def test_the_summary_is_a_sentence() -> None:
    text = summary_text(HELD_OUT)
    assert text.startswith("4 cases: the median of absolute errors is 5.0%, nine in ten are below")
    assert text.endswith("the 90% interval, ±10% wide, holds 75% of the measurements")


def test_the_picture_shows_every_place(tmp_path: pathlib.Path) -> None:
    figure = plot_backtest(HELD_OUT, counted=4)
    (axes,) = figure.axes
    legend = axes.get_legend()
    assert legend is not None
    texts = {text.get_text() for text in legend.get_texts()}
    assert {"2 ranks, loopback (2)", "2 ranks, 1 Gbit/s (2)", "within 20%"} <= texts
    assert axes.get_xlabel() == "measured step time (s)"
    assert all(path.stat().st_size for path in save_figure(figure, tmp_path, "backtest"))


def test_without_intervals_every_case_has_a_row(tmp_path: pathlib.Path) -> None:
    labels = {"batch": "2", "context": "32"}
    few = [
        HeldOutPrediction(
            case=dataclasses.replace(each.case, labels={**each.case.labels, **labels}),
            predicted=Estimate(value=each.predicted.value),
        )
        for each in HELD_OUT[:2]
    ]
    table = backtest_table(few, counted=2)
    assert table.headers[-3:] == ("predicted", "measured", "error")
    assert table.rows == (
        ("small", "2 x 32", "2", "loopback", "flat", "1020.0", "1000.0", "+2.0%"),
        ("small", "2 x 32", "2", "1 Gbit/s", "flat", "950.0", "1000.0", "-5.0%"),
    )
    assert "no intervals" in table.notes[0]
    assert save_figure(plot_backtest(few, counted=2), tmp_path, "few")
