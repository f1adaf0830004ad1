import itertools
from typing import TYPE_CHECKING, Any

from paceline.records import Record
from paceline.reports.plots.registry import draw
from tests.unit.record_factory import attention_record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMPLEMENTATIONS = ("naive", "tiled", "sdpa", "triton")


def record(implementation: str, context: int = 256, **case: Any) -> Record:
    case = {"dtype": "float32", **case}
    return attention_record(context, implementation=implementation, **case)


def lines_by_label(axes: "Axes") -> dict[str, Any]:
    return {str(line.get_label()): line for line in axes.lines}


def legend_labels(figure: "Figure") -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def rows_of(figure: "Figure") -> list[int]:
    return [axes.get_subplotspec().rowspan.start for axes in figure.axes]  # type: ignore[union-attr]


def test_widths_are_columns_and_formats_rows() -> None:
    widths, dtypes = (16, 32, 64, 128), ("float32", "bfloat16")
    cases = itertools.product(("naive", "sdpa"), (256, 1024), dtypes, widths)
    records = [record(*case[:2], dtype=case[2], head_dim=case[3]) for case in cases]
    figure = draw("attention-memory", records)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [f"head dim {width}, dtype {dtype}" for dtype in dtypes for width in widths]
    assert [axes.get_subplotspec().colspan.start for axes in figure.axes] == [0, 1, 2, 3] * 2  # type: ignore[union-attr]
    assert len({(*axes.get_xlim(), *axes.get_ylim()) for axes in figure.axes}) == 1


def test_formats_of_one_width_stand_side_by_side_and_a_fifth_width_wraps() -> None:
    formats = [record(name, dtype=dtype) for name in ("tiled", "sdpa") for dtype in ("a", "b")]
    assert rows_of(draw("attention-time", formats)) == [0, 0]
    widths = [record(name, head_dim=n) for n in range(1, 6) for name in ("tiled", "sdpa")]
    figure = draw("attention-time", widths)
    assert rows_of(figure) == [0] * 4 + [1] * 4
    assert [axes.get_visible() for axes in figure.axes] == [True] * 5 + [False] * 3


def test_an_implementation_keeps_its_colour_and_a_pass_its_dashes() -> None:
    together = draw("attention-time", [record(name) for name in IMPLEMENTATIONS])
    every = lines_by_label(together.axes[0])
    assert len({line.get_color() for line in every.values()}) == len(IMPLEMENTATIONS)
    dashes = [every[f"{name}, sdpa"].get_linestyle() for name in ("forward", "backward")]
    assert dashes == ["-", "--"]
    for pair in (("sdpa", "triton"), ("triton", "naive")):
        figure = draw("attention-time", [record(name) for name in pair])
        lines = lines_by_label(figure.axes[0])
        for name, line in itertools.product(pair, ("forward", "backward")):
            color = every[f"forward, {name}"].get_color()
            assert lines[f"{line}, {name}"].get_color() == color
        assert set(legend_labels(figure)) == {*pair, "forward", "backward"}


def test_cases_without_numbers_are_marked_above_all_others() -> None:
    records = [
        *(record("sdpa", context) for context in (256, 1024, 4096)),
        record("naive", 256),
        record("naive", 4096, outcome="out_of_memory"),
        *(record("triton", context, outcome="skipped") for context in (256, 1024, 4096)),
    ]
    figure = draw("attention-time", records)
    axes = figure.axes[0]
    marks = {
        line.get_color(): (list(line.get_xdata()), set(line.get_ydata()))
        for line in axes.lines
        if line.get_marker() == "x"
    }
    lines = lines_by_label(axes)
    naive_lengths, naive_heights = marks[lines["forward, naive"].get_color()]
    triton_lengths, triton_heights = marks[lines["forward, triton"].get_color()]
    assert (naive_lengths, triton_lengths) == ([4096], [256, 1024, 4096])
    assert max(triton_heights) < min(naive_heights) < 1
    to_panel = axes.transData + axes.transAxes.inverted()
    highest = max(
        to_panel.transform(point)[1]
        for line in axes.lines
        if line.get_marker() != "x"
        for point in zip(line.get_xdata(), line.get_ydata(), strict=True)
    )
    assert highest < min(triton_heights)
    assert legend_labels(figure)[-1] == "out of memory\nor skipped"


def test_only_the_naive_one_is_said_to_store_its_scores() -> None:
    for names in (("naive",), ("sdpa",), ("naive", "sdpa")):
        figure = draw("attention-time", [record(name, n) for name in names for n in (256, 1024)])
        what = "Attention that stores its scores" if names == ("naive",) else "Attention"
        assert figure.get_suptitle() == f"{what}: time"
