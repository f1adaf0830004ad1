"""Memory by strategy as a table and a picture, from records made by hand."""

import pytest

from paceline.reports.plots.registry import draw, drawable_plots
from paceline.reports.tables.table import records_table
from paceline.reports.tables.with_predictions import with_predictions
from tests.unit.reports.factory import optimizer_record

MEASURED = [
    optimizer_record("torch_ddp", (40, 40, 80, 5, 35)),
    optimizer_record("sharded_optimizer", (40, 40, 40, 5, 35)),
]
PREDICTED = [optimizer_record("sharded_optimizer", (40, 40, 40, 5, 27), is_prediction=True)]
RECORDS = [*MEASURED, *PREDICTED]


def test_a_row_has_the_parts_and_the_error_of_the_prediction() -> None:
    table = records_table(with_predictions(MEASURED, RECORDS))
    rows = [dict(zip(table.headers, row, strict=True)) for row in table.rows]
    assert rows[0]["strategy"] == "torch_ddp"
    assert rows[0]["step (ms)"] == "300 ± 100"
    assert rows[0]["before step"] == "200.00 MiB"
    assert rows[0]["predicted"] == rows[0]["error"] == "n/a"
    assert rows[1]["optimizer state"] == "40.00 MiB"
    assert rows[1]["predicted"] == "152.00 MiB"
    assert rows[1]["error"] == "-5.00%"


def test_all_three_instants_are_in_the_memory_view() -> None:
    table = records_table(with_predictions(MEASURED, RECORDS), "memory")
    rows = [dict(zip(table.headers, row, strict=True)) for row in table.rows]
    assert rows[1]["after init"] == "160.00 MiB"
    assert rows[1]["predicted after step"] == "152.00 MiB"


def test_a_prediction_of_another_case_is_left_out() -> None:
    other = optimizer_record("torch_ddp", (1, 1, 1, 1, 1), is_prediction=True, batch=99)
    assert with_predictions(MEASURED, [*MEASURED, other]) == MEASURED


def test_bars_are_stacked_and_predictions_hatched() -> None:
    assert drawable_plots(RECORDS) == ["optimizer-memory"]
    figure = draw("optimizer-memory", RECORDS)
    for axes in figure.axes:
        bars = list(axes.patches)
        assert len(bars) == 3 * 5
        ends = [bar.get_x() + bar.get_width() for bar in bars]
        assert ends[4::5] == pytest.approx([200, 160, 152])
        assert [bool(bar.get_hatch()) for bar in bars[4::5]] == [False, False, True]
        labels = [label.get_text() for label in axes.get_yticklabels()]
        assert labels == ["torch_ddp", "sharded_optimizer"]
    assert "MiB" in figure.axes[-1].get_xlabel()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][-1] == "predicted"


def test_without_predictions_nothing_is_hatched() -> None:
    figure = draw("optimizer-memory", MEASURED)
    assert not any(bar.get_hatch() for axes in figure.axes for bar in axes.patches)
    assert "predicted" not in [text.get_text() for text in figure.legends[0].get_texts()]
