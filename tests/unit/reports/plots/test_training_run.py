"""Tests of the demonstration's figure: planned and measured values, in light and dark style."""

import pathlib

import pytest
from matplotlib.colors import to_hex

from paceline.core.plan import Estimate
from paceline.predict.history import HistoryEntry
from paceline.reports.plots.style import dark
from paceline.reports.plots.training_run import plot_story
from paceline.reports.training_run import read_run

RUN = pathlib.Path(__file__).parents[4] / "results" / "training-run"


def _step(low: float | None = None, high: float | None = None) -> HistoryEntry:
    return HistoryEntry(
        quantity="step_time_s",
        run="run",
        parameters=1000,
        world_size=2,
        threads=1,
        hardware="a processor",
        formula=0.15,
        predicted=Estimate(value=0.16, low=low, high=high),
        measured=0.158,
    )


@pytest.mark.parametrize(
    ("step", "planned"),
    [
        (_step(), "planned: 160 ms"),
        (_step(0.15, 0.17), "planned: 160 ms, 90% interval 150 to 170 ms"),
    ],
)
def test_the_legend_says_what_was_planned_and_measured(step: HistoryEntry, planned: str) -> None:
    figure = plot_story(read_run(RUN), step, "1,000 parameters")
    steps, loss = figure.axes
    legend = steps.get_legend()
    assert legend is not None
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["measured: 158 ms in the median", planned]
    assert loss.get_ylabel() == "loss (nats per token)"
    (_, top) = steps.get_ylim()
    assert top > 170


def test_at_night_the_background_is_dark_and_every_word_is_light() -> None:
    figure = dark(lambda: plot_story(read_run(RUN), _step(), "1,000 parameters"))
    assert to_hex(figure.get_facecolor()) == "#0d1117"
    words = [axes.xaxis.label for axes in figure.axes]
    for word in words:
        assert to_hex(word.get_color()) == "#c9d1d9"
    assert figure._supxlabel is not None
    assert to_hex(figure._supxlabel.get_color()) == "#c9d1d9"
