"""Tests of the table and the figure of predicted and measured steps."""

import dataclasses
import pathlib

import pytest

from paceline.core.plan import Estimate
from paceline.predict.backtest import GROUPS, BacktestCase, HeldOutPrediction
from paceline.reports.plots.planning import plot_backtest
from paceline.reports.plots.style import save_figure
from paceline.reports.tables.predictions import backtest_table

STEP = {"model": "small", "batch": "2", "context": "32"}


def _held_out(strategy: str, link: str, predicted_s: float) -> HeldOutPrediction:
    """Returns a case measured at one second, with an interval of ±10% around the prediction."""
    labels = {"ranks": "2", "link": link, "strategy": strategy, **STEP}
    terms = {term: 0.1 for group in GROUPS.values() for term in group}
    case = BacktestCase(labels=labels, terms=terms, measured_s=1.0)
    predicted = Estimate(value=predicted_s, low=0.9 * predicted_s, high=1.1 * predicted_s)
    return HeldOutPrediction(case=case, predicted=predicted, measured=case.measured_s)


LINKS = ("loopback", "1 Gbit/s")
HELD_OUT = [_held_out("flat", *case) for case in zip(LINKS, (1.02, 0.95), strict=True)]
HELD_OUT += [_held_out("zero2", *case) for case in zip(LINKS, (1.05, 1.3), strict=True)]


def test_every_strategy_at_every_place_has_a_row() -> None:
    table = backtest_table([*HELD_OUT, _held_out("flat", "loopback", 0.5)], counted=4)
    places = [f"2 {link} {name}" for name in ("flat", "zero2") for link in LINKS]
    assert [" ".join(row[:3]).strip() for row in table.rows] == [*places, "all"]
    assert table.rows[0][3:] == ("2", "1000 to 1000", "26.0%", "-50.0%", "1 of 2")
    # Uncounted cases are shown in their group, but not in the total.
    assert table.rows[-1][3:] == ("4", "1000 to 1000", "5.0%", "+30.0%", "3 of 4")


def test_notes_say_how_far_to_trust_it_and_leave_groups_out_where_enough_are_left() -> None:
    (text,) = backtest_table(HELD_OUT, counted=4).notes
    # There is only one model, so leaving it out would leave no cases to fit.
    _all, by_link = backtest_table(HELD_OUT * 6, counted=24).notes
    assert by_link.startswith("with all cases of a link left out together, 24 cases")
    assert text.startswith("4 cases: the median of absolute errors is 5.0%, nine in ten are below")
    assert text.endswith("the 90% interval, ±10% wide, holds 75% of the measurements")


def test_the_picture_shows_every_place_and_case() -> None:
    (axes,) = plot_backtest(HELD_OUT, counted=4).axes
    (loopback, _caps, (bars,)), _shaped = axes.containers
    assert list(loopback.get_xdata()) == [1.0, 1.0]
    assert list(loopback.get_ydata()) == pytest.approx([1.02, 1.05])
    assert bars.get_segments()[0][:, 1] == pytest.approx([0.9 * 1.02, 1.1 * 1.02])
    texts = {text.get_text() for text in axes.get_legend().get_texts()}  # type: ignore[union-attr]
    assert {"2 ranks, loopback (2)", "2 ranks, 1 Gbit/s (2)", "within 20%"} <= texts
    assert axes.get_xlabel() == "measured step time (s)"


def test_without_intervals_every_case_has_a_row(tmp_path: pathlib.Path) -> None:
    few = [
        dataclasses.replace(each, predicted=Estimate(value=each.predicted.value))
        for each in HELD_OUT[:2]
    ]
    table = backtest_table(few, counted=2)
    assert table.headers[-3:] == ("predicted", "measured", "error")
    first, second = ("loopback", "flat", "1020.0"), ("1 Gbit/s", "flat", "950.0")
    step = ("small", "2 x 32", "2")
    assert table.rows == ((*step, *first, "1000.0", "+2.0%"), (*step, *second, "1000.0", "-5.0%"))
    assert "no intervals" in table.notes[0]
    assert save_figure(plot_backtest(few, counted=2), tmp_path, "few")
