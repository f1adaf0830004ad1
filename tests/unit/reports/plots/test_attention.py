import collections
import itertools
from typing import Any

from paceline.records import Record
from paceline.reports.plots.attention import plot_tiles
from paceline.reports.plots.registry import draw
from tests.unit.record_factory import attention_record


def record(implementation: str, context: int = 256, **case: Any) -> Record:
    case = {"dtype": "float32", **case}
    return attention_record(context, implementation=implementation, **case)


def lines_by_label(axes: Any) -> dict[str, Any]:
    return {str(line.get_label()): line for line in axes.lines}


def legend_labels(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def rows_of(figure: Any) -> list[int]:
    return [axes.get_subplotspec().rowspan.start for axes in figure.axes]


def test_widths_are_columns_and_formats_rows() -> None:
    widths, dtypes = (16, 32, 64, 128), ("float32", "bfloat16")
    cases = itertools.product(("naive", "sdpa"), (256, 1024), dtypes, widths)
    records = [record(*case[:2], dtype=case[2], head_dim=case[3]) for case in cases]
    figure = draw("attention-memory", records)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [f"head dim {width}, dtype {dtype}" for dtype in dtypes for width in widths]
    assert [axes.get_subplotspec().colspan.start for axes in figure.axes] == [0, 1, 2, 3] * 2
    assert len({(*axes.get_xlim(), *axes.get_ylim()) for axes in figure.axes}) == 1
    # With one head dim, dtypes are columns; a fifth head dim wraps to a new row.
    formats = [record(name, dtype=dtype) for name in ("tiled", "sdpa") for dtype in ("a", "b")]
    assert rows_of(draw("attention-time", formats)) == [0, 0]
    records = [record(name, head_dim=n) for n in range(1, 6) for name in ("tiled", "sdpa")]
    figure = draw("attention-time", records)
    assert rows_of(figure) == [0] * 4 + [1] * 4
    assert [axes.get_visible() for axes in figure.axes] == [True] * 5 + [False] * 3


def test_an_implementation_keeps_its_colour_and_a_pass_its_dashes() -> None:
    names = ("naive", "tiled", "sdpa", "triton")
    together = draw("attention-time", [record(name) for name in names])
    every = lines_by_label(together.axes[0])
    assert len({line.get_color() for line in every.values()}) == len(names)
    dashes = [every[f"{line}, sdpa"].get_linestyle() for line in ("forward", "backward")]
    assert dashes == ["-", "--"]
    for pair in (("sdpa", "triton"), ("triton", "naive")):
        figure = draw("attention-time", [record(name) for name in pair])
        lines = lines_by_label(figure.axes[0])
        for name, line in itertools.product(pair, ("forward", "backward")):
            color = every[f"forward, {name}"].get_color()
            assert lines[f"{line}, {name}"].get_color() == color
        assert set(legend_labels(figure)) == {*pair, "forward", "backward"}


def test_cases_without_numbers_are_marked_above_all_others() -> None:
    lengths = [256, 1024, 4096]
    records = [*(record("sdpa", length) for length in lengths), record("naive", 256)]
    records += [record("naive", 4096, outcome="out_of_memory")]
    records += [record("triton", length, outcome="skipped") for length in lengths]
    figure = draw("attention-time", records)
    axes = figure.axes[0]
    lines = lines_by_label(axes)
    marks = {line.get_color(): line for line in axes.lines if line.get_marker() == "x"}
    naive, triton = (marks[lines[f"forward, {name}"].get_color()] for name in ("naive", "triton"))
    assert (list(naive.get_xdata()), list(triton.get_xdata())) == ([4096], lengths)
    assert max(triton.get_ydata()) < min(naive.get_ydata()) < 1
    to_panel = axes.transData + axes.transAxes.inverted()
    points = [
        to_panel.transform(line.get_xydata()) for line in axes.lines if line not in marks.values()
    ]
    assert max(drawn[:, 1].max() for drawn in points if len(drawn)) < min(triton.get_ydata())
    assert legend_labels(figure)[-1] == "out of memory\nor skipped"
    alone = draw("attention-memory", records[3:5]).axes[0]
    assert "out of memory" in [text.get_text().strip() for text in alone.texts]
    assert (alone.get_xscale(), alone.get_yscale()) == ("log", "log")


def test_only_the_naive_one_is_said_to_store_its_scores() -> None:
    for names in (("naive",), ("sdpa",), ("naive", "sdpa")):
        figure = draw("attention-time", [record(name, n) for name in names for n in (256, 1024)])
        what = "Attention that stores its scores" if names == ("naive",) else "Attention"
        assert figure.get_suptitle() == f"{what}: time"


def test_tiles_on_the_diagonal_are_masked() -> None:
    colors = collections.Counter(tile.get_facecolor() for tile in plot_tiles().axes[0].patches)
    # Of 8 x 8 tiles: those on the diagonal, below and above.
    assert sorted(colors.values()) == [8, 28, 28]
