import io
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from paceline.records import Metric, Record
from paceline.reports.plots.registry import draw
from paceline.reports.tables.table import records_table
from tests.unit.reports.factory import attention_record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def record(implementation: str, context: int, outcome: str = "ok", **case: Any) -> Record:
    case = {"implementation": implementation, "dtype": "float32", **case}
    return attention_record(context, outcome=outcome, **case)


IMPLEMENTATIONS = ("naive", "tiled", "sdpa", "triton")
GRID = [
    record(implementation, context, dtype=dtype, head_dim=head_dim)
    for dtype in ("float32", "bfloat16")
    for head_dim in (16, 32, 64, 128)
    for context in (256, 1024)
    for implementation in ("naive", "sdpa")
]


def line_colors(axes: "Axes") -> dict[str, Any]:
    return {str(line.get_label()): line.get_color() for line in axes.lines}


def legend_labels(figure: "Figure") -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("name", ["attention-time", "attention-memory"])
def test_widths_are_columns_and_formats_rows(name: str) -> None:
    figure = draw(name, GRID)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[:4] == [f"head dim {width}, dtype float32" for width in (16, 32, 64, 128)]
    assert titles[4:] == [f"head dim {width}, dtype bfloat16" for width in (16, 32, 64, 128)]
    assert [axes.get_subplotspec().colspan.start for axes in figure.axes] == [0, 1, 2, 3] * 2  # type: ignore[union-attr]
    assert len({(*axes.get_xlim(), *axes.get_ylim()) for axes in figure.axes}) == 1
    figure.savefig(io.BytesIO(), format="png")


def test_formats_of_one_width_stand_side_by_side_and_a_fifth_width_wraps() -> None:
    formats = [record(name, 256, dtype=dtype) for name in ("tiled", "sdpa") for dtype in ("a", "b")]
    rows = {axes.get_subplotspec().rowspan.start for axes in draw("attention-time", formats).axes}  # type: ignore[union-attr]
    assert rows == {0}
    widths = [record(name, 256, head_dim=n) for n in range(1, 6) for name in ("tiled", "sdpa")]
    panels = draw("attention-time", widths).axes
    assert [axes.get_subplotspec().rowspan.start for axes in panels] == [0] * 4 + [1] * 4  # type: ignore[union-attr]
    assert [axes.get_visible() for axes in panels] == [True] * 5 + [False] * 3


def test_an_implementation_keeps_its_colour_whichever_others_there_are() -> None:
    every = line_colors(
        draw("attention-time", [record(name, 256) for name in IMPLEMENTATIONS]).axes[0]
    )
    assert len(set(every.values())) == len(IMPLEMENTATIONS)
    for pair in (("sdpa", "triton"), ("triton", "naive")):
        figure = draw("attention-time", [record(name, 256) for name in pair])
        colors = line_colors(figure.axes[0])
        for name in pair:
            assert colors[f"forward, {name}"] == every[f"forward, {name}"]
            assert colors[f"backward, {name}"] == every[f"forward, {name}"]
        assert set(legend_labels(figure)) == {*pair, "forward", "backward"}


def test_forward_is_solid_and_backward_dashed() -> None:
    axes = draw("attention-time", [record(name, 256) for name in IMPLEMENTATIONS]).axes[0]
    styles = {str(line.get_label()): line.get_linestyle() for line in axes.lines}
    assert (styles["forward, sdpa"], styles["backward, sdpa"]) == ("-", "--")


def test_cases_without_numbers_are_marked_above_all_others() -> None:
    records = [
        *(record("sdpa", context) for context in (256, 1024, 4096)),
        record("naive", 256),
        record("naive", 4096, "out_of_memory"),
        *(record("triton", context, "skipped") for context in (256, 1024, 4096)),
    ]
    figure = draw("attention-time", records)
    axes = figure.axes[0]
    marks = {
        line.get_color(): (list(line.get_xdata()), set(line.get_ydata()))
        for line in axes.lines
        if line.get_marker() == "x"
    }
    colors = line_colors(axes)
    naive_lengths, naive_heights = marks[colors["forward, naive"]]
    triton_lengths, triton_heights = marks[colors["forward, triton"]]
    assert (naive_lengths, triton_lengths) == ([4096], [256, 1024, 4096])
    assert max(triton_heights) < min(naive_heights) < 1
    drawn = [line for line in axes.lines if line.get_marker() != "x" and len(line.get_ydata())]
    to_panel = axes.transData + axes.transAxes.inverted()
    highest = max(
        to_panel.transform(point)[1]
        for line in drawn
        for point in zip(line.get_xdata(), line.get_ydata(), strict=True)
    )
    assert highest < min(triton_heights)
    assert legend_labels(figure)[-1] == "out of memory\nor skipped"


def test_only_the_naive_one_is_said_to_store_its_scores() -> None:
    def title(*names: str) -> str:
        records = [record(name, context) for name in names for context in (256, 1024)]
        return str(draw("attention-time", records).get_suptitle())

    assert title("naive") == "Attention that stores its scores: time"
    assert title("sdpa") == title("naive", "sdpa") == "Attention: time"


def test_both_passes_and_their_rate_are_columns_where_there_are_any() -> None:
    old = record("naive", 256)
    assert records_table([old]).headers[:3] == (
        "forward (ms)",
        "backward (ms)",
        "saved for backward",
    )
    metrics = {"both_time_s": Metric(value=0.25), "flops_per_s": Metric(value=3.2e9)}
    new = msgspec.structs.replace(record("sdpa", 256), metrics={**old.metrics, **metrics})
    table = records_table([old, new])
    columns = [table.headers.index(header) for header in ("both (ms)", "FLOP/s")]
    assert [[row[column] for column in columns] for row in table.rows] == [
        ["n/a", "n/a"],
        ["250", "3.2 G"],
    ]
