import csv
import io
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from paceline.core import UsageError
from paceline.records import Metric, Record, find_kind
from paceline.reports.tables.table import Table, records_table, render_csv, render_markdown
from tests.unit.reports.factory import ENVIRONMENT, attention_record, step_record


def test_what_varies_is_a_column_and_the_rest_the_caption() -> None:
    table = records_table([step_record(model="small"), step_record(model="medium", seconds=0.3)])
    assert table.headers[:2] == ("model", "forward (ms)")
    assert "batch 4" in table.caption
    assert "model" not in table.caption
    assert table.rows[1][:2] == ("medium", "300 ± 45.8")
    assert table.rows[0][table.headers.index("peak")] == "3.00 GiB"


def test_an_unknown_peak_is_not_applicable() -> None:
    table = records_table([step_record(), step_record(model="xl", utilization=0.415)])
    column = table.headers.index("MFU / causal")
    assert [row[column] for row in table.rows] == ["n/a", "41.5% / 40.0%"]


def test_memory_is_a_view_of_its_own() -> None:
    table = records_table([step_record()], "memory")
    assert table.headers[:3] == ("after init", "before optimizer", "in optimizer")
    assert table.rows[0][:4] == ("1.00 GiB", "3.00 GiB", "2.00 GiB")
    with pytest.raises(UsageError, match="'attention' have no memory view"):
        records_table([attention_record(256, 16)], "memory")


def test_a_case_that_did_not_run_says_so() -> None:
    table = records_table([step_record(), step_record(model="2.7B", outcome="out_of_memory")])
    assert table.rows[1] == ("2.7B", "out of memory", *["-"] * (len(table.headers) - 2))
    assert table.notes == ("2.7B: out of memory: a reason",)
    assert render_markdown(table).endswith("\n\n- 2.7B: out of memory: a reason\n")


def test_a_shape_without_a_name_shows_its_dimensions() -> None:
    records = [step_record(model="custom", d_model=64), step_record(model="custom", d_model=128)]
    assert records_table(records).headers[0] == "d model"


def test_one_sample_has_no_spread() -> None:
    record = attention_record(1000, 16)
    assert records_table([record]).rows[0][0] == "1.00"


def test_markdown_is_a_table_and_escapes_pipes() -> None:
    text = render_markdown(records_table([step_record(model="a|b"), step_record(model="c")]))
    lines = text.splitlines()
    assert lines[2].startswith("| model | forward (ms) |")
    assert set(lines[3]) <= set("| -")
    assert lines[4].startswith(r"| a\|b |")
    assert len({line.replace(r"\|", "").count("|") for line in lines[2:]}) == 1


def test_csv_is_complete_and_raw() -> None:
    records = [step_record(seconds=0.25), step_record(model="xl", outcome="skipped")]
    rows = list(csv.DictReader(io.StringIO(render_csv(records))))
    assert float(rows[0]["forward_time_s"]) == 0.25
    assert float(rows[0]["forward_time_s_std"]) > 0
    assert rows[0]["hardware"] == "x"
    assert (rows[1]["outcome"], rows[1]["reason"], rows[1]["forward_time_s"]) == (
        "skipped",
        "a reason",
        "",
    )


def _printed(table: Table, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_markup_in_a_record_is_text_on_a_terminal() -> None:
    records = [step_record(model="[red]x"), step_record(model="y")]
    assert any("[red]x" in line for line in _printed(records_table(records), 200))


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 99), *[st.sampled_from(["n/a", "15.3 ± 1.5", "torch_ddp"])] * 7),
        min_size=1,
        max_size=6,
        unique_by=lambda row: row[0],
    ),
    st.integers(24, 120),
)
def test_a_terminal_shows_every_figure_whole_and_in_its_row(
    cells: list[tuple[Any, ...]], width: int
) -> None:
    rows = tuple(tuple(map(str, row)) for row in cells)
    headers = ("case", *(f"quantity{index} (ms)" for index in range(7)))
    lines = _printed(Table(headers=headers, rows=rows, caption=""), width)
    assert max(map(len, lines)) <= width
    for row in rows:
        told = " ".join(line for line in lines if line.split()[:1] == [row[0]])
        for figure in ("15.3 ± 1.5", "torch_ddp"):
            assert told.count(figure) == row.count(figure)


def test_rows_of_other_columns_are_tables_of_their_own_where_keys_leave_no_room() -> None:
    headers = ("quantity", *(f"dimension{index}" for index in range(8)), "time (ms)")
    rows = (
        ("linear", "256", "512", *("n/a",) * 5, "64", "1.35 ± 0.23"),
        ("linear", "256", "512", *("n/a",) * 5, "65", "5.01 ± 0.64"),
        ("call", *("n/a",) * 7, "66", "0.70 ± 0.07"),
    )
    lines = _printed(Table(headers=headers, rows=rows, caption=""), 60)
    assert [line.split() for line in lines if "linear" in line or "call" in line] == [
        ["linear", "256", "512", "64", "1.35", "±", "0.23"],
        ["linear", "256", "512", "65", "5.01", "±", "0.64"],
        ["call", "66", "0.70", "±", "0.07"],
    ]
    narrow = " ".join(_printed(Table(headers=headers, rows=rows, caption=""), 14))
    assert "time (ms): 1.35" in " ".join(narrow.split())
    assert "n/a" not in narrow


@pytest.mark.parametrize(
    ("kind", "values", "cells"),
    [
        (
            "ddp",
            {
                "step_time_s": 2.0,
                "step_time_ratio": 0.98765,
                "forward_time_s": 0.5,
                "backward_time_s": 1.0,
                "exposed_communication_s": 0.25,
                "communication_s": 0.75,
                "num_messages": 17.0,
                "chosen_bucket_size_mb": 25.0,
            },
            ("2000", "0.988", "500", "1000", "250", "750", "17", "25 MiB"),
        ),
        (
            "calibration",
            {
                "forward_time_s": 0.001,
                "backward_time_s": 0.002,
                "element_time_s": 1.5e-9,
                "latency_s": 0.003,
                "algorithm_bandwidth_bytes_per_s": 2e9,
                "max_relative_error": 0.125,
                "lost_s_per_byte": 6e-10,
                "slowdown": 2.5,
            },
            ("1.00", "2.00", "1.50", "3.00", "2 GB/s", "12.5%", "0.600", "2.50"),
        ),
        (
            "prediction",
            {
                "step_time_s": 0.5,
                "matmul_s": 0.1,
                "attention_s": 0.02,
                "elementwise_s": 0.003,
                "launch_s": 0.0004,
                "optimizer_s": 0.05,
                "bucket_copy_s": 0.006,
                "contention_s": 0.007,
                "exposed_s": 0.008,
            },
            ("500", "123", "56.0", "7.00", "8.00"),
        ),
        (
            "timeline",
            {
                "compute_s": 0.1,
                "contention_s": 0.2,
                "exposed_communication_s": 0.3,
                "idle_s": 0.4,
                "step_time_s": 1.0,
                "overlapped_communication_s": 0.6,
                "reported_exposed_s": 0.7,
            },
            ("100", "200", "300", "400", "1000", "600", "700"),
        ),
    ],
)
def test_columns_show_their_metrics_in_their_units(
    kind: str, values: dict[str, float], cells: tuple[str, ...]
) -> None:
    measured = "ddp" if kind == "prediction" else kind
    case = dict.fromkeys(find_kind(measured).join_key, "x")
    record = Record(
        kind=kind,
        case={**case, "predicts": measured} if kind == "prediction" else case,
        environment=ENVIRONMENT,
        metrics={name: Metric(value=value) for name, value in values.items()},
        outcome="ok",
    )
    table = records_table([record])
    assert table.rows == (cells,)
    times = [header for header in table.headers if header.endswith(("(ms)", "(ns)", "(ms/MB)"))]
    assert len(times) == {"ddp": 5, "calibration": 5, "prediction": 5, "timeline": 7}[kind]


def test_a_spread_beyond_the_value_is_marked() -> None:
    def with_deviation(model: str, deviation: float) -> Record:
        record = step_record(model=model)
        step = Metric(value=0.1, std=deviation, samples=(0.1, 0.1))
        return msgspec.structs.replace(record, metrics={**record.metrics, "step_time_s": step})

    table = records_table([with_deviation("small", 0.099), with_deviation("xl", 0.101)])
    column = table.headers.index("step (ms)")
    assert [row[column] for row in table.rows] == ["100 ± 99.0", "100 ± 101 (!)"]
    assert [note[:3] for note in table.notes] == ["(!)"]


def test_one_table_has_one_kind() -> None:
    with pytest.raises(UsageError, match=r"attention, step; choose with --kind"):
        records_table([step_record(), attention_record(256, 16)])
    with pytest.raises(UsageError, match="no records"):
        records_table([])
