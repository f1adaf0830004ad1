import pathlib

import pytest

from paceline.core import UsageError
from paceline.reports.plots import PLOTS, draw, drawable_plots, save_figure
from tests.unit.reports.factory import attention_record, step_record

STEPS = [
    step_record(model=model, precision=precision, warmup=warmup, seconds=seconds)
    for model, seconds in (("small", 0.1), ("medium", 0.4))
    for precision in ("float32", "bfloat16")
    for warmup in (0, 5)
]
ATTENTION = [
    *(attention_record(context, width) for context in (256, 1024, 4096) for width in (16, 64)),
    attention_record(16384, 64, outcome="out_of_memory"),
]


@pytest.mark.parametrize("name", PLOTS)
def test_every_plot_is_written_twice_and_reproducibly(name: str, tmp_path: pathlib.Path) -> None:
    contents = []
    for attempt in ("first", "second"):
        paths = save_figure(draw(name, [*STEPS, *ATTENTION]), tmp_path / attempt, name)
        assert [path.suffix for path in paths] == [".png", ".svg"]
        contents.append([path.read_bytes() for path in paths])
    assert contents[0][0].startswith(b"\x89PNG")
    assert b"<svg" in contents[0][1]
    assert contents[0] == contents[1]


def test_bars_are_as_high_as_the_medians() -> None:
    figure = draw("step-time", [step_record(seconds=0.1), step_record(model="xl", seconds=0.4)])
    heights = sorted(patch.get_height() for patch in figure.axes[0].patches)
    assert heights == pytest.approx([100.0] * 3 + [400.0] * 3)
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["small", "xl"]


def test_warmup_shows_every_sample() -> None:
    figure = draw("warmup", [step_record(warmup=count) for count in (0, 1, 5)])
    axes = figure.axes[0]
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert [len(line.get_ydata()) for line in dots] == [3, 3, 3]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "5"]


def test_what_ran_out_of_memory_is_marked() -> None:
    figure = draw("attention-memory", ATTENTION)
    axes = figure.axes[0]
    assert any("out of memory" in text.get_text() for text in axes.texts)
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    line = next(line for line in axes.lines if line.get_label() == "saved for backward, d 16")
    assert list(line.get_ydata()) == pytest.approx([2.0, 32.0, 512.0])


def test_only_what_can_be_compared_is_offered() -> None:
    assert drawable_plots([step_record()]) == ["step-time"]
    assert drawable_plots(STEPS) == ["step-time", "warmup", "precision"]
    assert drawable_plots(ATTENTION) == ["attention-time", "attention-memory"]
    assert drawable_plots([step_record(outcome="failed")]) == []
    with pytest.raises(UsageError, match=r"'warmup'.*no 'step' measurements"):
        draw("warmup", ATTENTION)
