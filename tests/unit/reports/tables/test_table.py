import csv
import io
import itertools
import pathlib
import re
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from paceline.core import UsageError
from paceline.records import Metric, Record
from paceline.reports.tables.predictions import with_predictions
from paceline.reports.tables.table import Table, records_table, render_csv, render_markdown
from tests.unit import record_factory
from tests.unit.record_factory import MEASURED_MEMORY, attention_record, make_record, step_record


def rows_by_header(table: Table) -> list[dict[str, str]]:
    return [dict(zip(table.headers, row, strict=True)) for row in table.rows]


def with_metrics(record: Record, **metrics: Metric) -> Record:
    return msgspec.structs.replace(record, metrics={**record.metrics, **metrics})


def test_a_column_is_a_header_and_the_cell_of_an_item() -> None:
    columns = {"number": lambda item: item, "half": lambda item: f"{item / 2:.1f}"}
    table = Table.of([1, 2], columns, caption="two", notes=["a note"])
    rows = (("1", "0.5"), ("2", "1.0"))
    assert table == Table(headers=("number", "half"), rows=rows, caption="two", notes=("a note",))
    assert Table.of([], columns, caption="none").headers == ("number", "half")


def test_what_varies_is_a_column_and_the_rest_the_caption() -> None:
    table = records_table([step_record(model="small"), step_record(model="medium", seconds=0.3)])
    assert table.headers[:2] == ("model", "forward (ms)")
    assert "batch 4" in table.caption
    assert "model" not in table.caption
    assert table.rows[1][:2] == ("medium", "300 ± 45.8")
    assert rows_by_header(table)[0]["peak"] == "3.00 GiB"
    unnamed = [step_record(model="custom", d_model=64), step_record(model="custom", d_model=128)]
    assert records_table(unnamed).headers[0] == "d model"
    linked = [step_record(link_rate_bits_per_s=rate) for rate in (None, 2e9)]
    assert [row[0] for row in records_table(linked).rows] == ["unshaped", "2 Gbit/s"]


def test_what_is_not_known_is_not_applicable() -> None:
    table = records_table([step_record(), step_record(model="xl", utilization=0.415)])
    assert [row["MFU / causal"] for row in rows_by_header(table)] == ["n/a", "41.5% / 40.0%"]
    old = attention_record(256)
    new = with_metrics(old, both_time_s=Metric(value=0.25), flops_per_s=Metric(value=3.2e9))
    without = ("forward (ms)", "backward (ms)", "saved for backward")
    assert records_table([old]).headers[:3] == without
    rows = rows_by_header(records_table([old, new]))
    assert [row["both (ms)"] for row in rows] == ["n/a", "250"]
    assert [row["FLOP/s"] for row in rows] == ["n/a", "3.2 G"]


def test_memory_is_a_view_of_its_own_and_a_table_has_one_kind() -> None:
    (row,) = rows_by_header(records_table([step_record()], "memory"))
    instants = ("after init", "before optimizer", "in optimizer")
    assert row == dict(zip(instants, ("1.00 GiB", "3.00 GiB", "2.00 GiB"), strict=True))
    with pytest.raises(UsageError, match="'attention' have no memory view"):
        records_table([attention_record(256, 16)], "memory")
    with pytest.raises(UsageError, match=r"attention, step; choose with --kind"):
        records_table([step_record(), attention_record(256, 16)])
    with pytest.raises(UsageError, match="no records"):
        records_table([])


def test_a_prediction_stands_with_its_error_beside_the_case_that_it_is_of() -> None:
    other = record_factory.optimizer_record("torch_ddp", (1,) * 5, is_prediction=True, batch=99)
    predictions = [record_factory.PREDICTED_MEMORY, other]
    joined = with_predictions(MEASURED_MEMORY, [*MEASURED_MEMORY, *predictions])
    assert joined[0] == MEASURED_MEMORY[0]
    first, second = rows_by_header(records_table(joined))
    measured = {"strategy": "torch_ddp", "step (ms)": "300 ± 100", "before step": "200.00 MiB"}
    assert first == {**first, **measured, "predicted": "n/a", "error": "n/a"}
    predicted = {"optimizer state": "40.00 MiB", "predicted": "152.00 MiB", "error": "-5.00%"}
    assert second == {**second, **predicted}
    _first, view = rows_by_header(records_table(joined, "memory"))
    assert (view["after init"], view["predicted after step"]) == ("160.00 MiB", "152.00 MiB")


def test_a_case_that_did_not_run_says_so() -> None:
    table = records_table([step_record(), step_record(model="2.7B", outcome="out_of_memory")])
    assert table.rows[1] == ("2.7B", "out of memory", *["-"] * (len(table.headers) - 2))
    assert table.notes == ("2.7B: out of memory: a reason",)
    assert render_markdown(table).endswith("\n\n- 2.7B: out of memory: a reason\n")


def test_a_spread_is_shown_where_there_is_one_and_marked_beyond_the_value() -> None:
    assert records_table([attention_record(1000)]).rows[0][0] == "1.00"
    steps = [Metric(value=0.1, std=std, samples=(0.1, 0.1)) for std in (0.099, 0.101)]
    pairs = zip((step_record(), step_record(model="xl")), steps, strict=True)
    table = records_table([with_metrics(record, step_time_s=step) for record, step in pairs])
    times = [row["step (ms)"] for row in rows_by_header(table)]
    assert times == ["100 ± 99.0", "100 ± 101 (!)"]
    assert [note[:3] for note in table.notes] == ["(!)"]


def test_markdown_is_a_table_and_escapes_pipes() -> None:
    text = render_markdown(records_table([step_record(model="a|b"), step_record(model="c")]))
    lines = text.splitlines()
    assert lines[2].startswith("| model | forward (ms) |")
    assert set(lines[3]) <= set("| -")
    assert lines[4].startswith(r"| a\|b |")
    assert len({line.replace(r"\|", "").count("|") for line in lines[2:]}) == 1


def test_csv_is_complete_and_raw() -> None:
    records = [step_record(seconds=0.25), step_record(model="xl", outcome="skipped")]
    ran, skipped = csv.DictReader(io.StringIO(render_csv(records)))
    assert float(ran["forward_time_s"]) == 0.25
    assert float(ran["forward_time_s_std"]) > 0
    assert ran["hardware"] == "x"
    told = [skipped[name] for name in ("outcome", "reason", "forward_time_s")]
    assert told == ["skipped", "a reason", ""]


def _printed(table: Table, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


# Markup in a record is printed as text.
FIGURES = ("15.3 ± 1.5", "torch_ddp", "[red]x")


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 99), *[st.sampled_from(["n/a", *FIGURES])] * 7),
        min_size=1,
        max_size=6,
        unique_by=lambda row: row[0],
    ),
    st.integers(24, 120),
)
@example([(1, *["n/a"] * 7)], 40)
def test_a_terminal_shows_every_figure_whole_and_in_its_row(
    cells: list[tuple[Any, ...]], width: int
) -> None:
    rows = tuple(tuple(map(str, row)) for row in cells)
    headers = ("case", *(f"quantity{index} (ms)" for index in range(7)))
    lines = _printed(Table(headers=headers, rows=rows, caption=""), width)
    assert max(map(len, lines)) <= width
    for row in rows:
        told = " ".join(line for line in lines if line.split()[:1] == [row[0]])
        assert told
        for figure in FIGURES:
            assert told.count(figure) == row.count(figure)


def test_rows_of_other_columns_are_tables_of_their_own_where_keys_leave_no_room() -> None:
    headers = ("quantity", *(f"dimension{index}" for index in range(8)), "time (ms)")
    rows = (
        ("linear", "256", "512", *("n/a",) * 5, "64", "1.35 ± 0.23"),
        ("linear", "256", "512", *("n/a",) * 5, "65", "5.01 ± 0.64"),
        ("call", *("n/a",) * 7, "66", "0.70 ± 0.07"),
    )
    lines = _printed(Table(headers=headers, rows=rows, caption=""), 60)
    shown = [line.split() for line in lines if "linear" in line or "call" in line]
    assert shown == [" ".join(row).replace("n/a", "").split() for row in rows]
    narrow = " ".join(_printed(Table(headers=headers, rows=rows, caption=""), 14))
    assert "time (ms): 1.35" in " ".join(narrow.split())
    assert "n/a" not in narrow


# Record kind: metrics and their values -> columns and their cells.
COLUMN_CASES = """
kernel: registers 128, spill_bytes 4, shared_bytes 2048, matrix_instructions 8, occupancy 0.25,
    worst_intensity 30, best_intensity 1500, worst_ceiling 0.5
    -> registers 128, spilled (B) 4, shared 2.00 KiB, matrix instructions 8, occupancy 25%,
    FLOPs/B at worst 30, at best 1500, ceiling at worst 50%
ddp: step_time_s 0.5, step_time_ratio 1.25, forward_time_s 0.1, backward_time_s 0.2,
    exposed_communication_s 0.03, communication_s 0.04, num_messages 7, chosen_bucket_size_mb 25
    -> step (ms) 500, ratio 1.250, forward (ms) 100, backward (ms) 200, exposed (ms) 30.0,
    communication time (ms) 40.0, collectives 7, chosen bucket size 25 MiB
timeline: compute_s 0.1, contention_s 0.2, exposed_communication_s 0.3, idle_s 0.4,
    step_time_s 1, overlapped_communication_s 0.5, reported_exposed_s 0.6
    -> compute (ms) 100, contention (ms) 200, exposed (ms) 300, idle (ms) 400, step (ms) 1000,
    overlapped (ms) 500, exposed, as reported (ms) 600
memory_timeline: peak_bytes 5120, parameters_at_peak_bytes 2048, gradients_at_peak_bytes 1024
    -> peak 5.00 KiB, parameters then 2.00 KiB, gradients then 1.00 KiB
operator: own_time_s 0.2, share 0.25, num_calls 3, flops 2e9
    -> own time (ms) 200, share 25.0%, calls 3, matmul FLOPs 2 G
comm: time_s 0.002, algorithm_bandwidth_bytes_per_s 1e9, bus_bandwidth_bytes_per_s 2e9
    -> time (ms) 2.00, algorithm bandwidth 1 GB/s, bus bandwidth 2 GB/s
calibration: forward_time_s 0.001, backward_time_s 0.002, element_time_s 1.5e-9,
    latency_s 0.003, algorithm_bandwidth_bytes_per_s 2e9, max_relative_error 0.125,
    lost_s_per_byte 6e-10, slowdown 2.5
    -> forward (ms) 1.00, backward (ms) 2.00, per element (ns) 1.50, latency (ms) 3.00,
    bandwidth 2 GB/s, largest error 12.5%, compute lost (ms/MB) 0.600, communication slowdown 2.50
prediction: step_time_s 0.5, matmul_s 0.1, attention_s 0.02, elementwise_s 0.003,
    launch_s 0.0004, optimizer_s 0.05, bucket_copy_s 0.006, contention_s 0.007, exposed_s 0.008
    -> step (ms) 500, compute (ms) 123, optimizer (ms) 56.0, contention (ms) 7.00, exposed (ms) 8.00
"""


@pytest.mark.parametrize("case", re.split(r"\n(?=\w)", COLUMN_CASES.strip()))
def test_columns_show_their_metrics_in_their_units(case: str) -> None:
    named, shown = " ".join(case.split()).split(" -> ")
    kind, _, metrics = named.partition(": ")
    numbers = dict(metric.split() for metric in metrics.split(", "))
    fields = {"predicts": "ddp"} if kind == "prediction" else {}
    record = make_record(kind, {name: float(number) for name, number in numbers.items()}, **fields)
    cells = rows_by_header(records_table([record]))[0].items()
    assert ", ".join(f"{header} {cell}" for header, cell in cells) == shown


GENERATED = pathlib.Path(__file__).parents[4] / "docs" / "generated"
_LONGEST_WORD = 30
"""Longer words are addresses and paths, which a terminal may break."""


def _tables(path: pathlib.Path) -> list[Table]:
    lines = path.read_text(encoding="utf-8").splitlines()
    groups = itertools.groupby(lines, lambda line: line.startswith("|"))
    tables = []
    for is_table, group in groups:
        if is_table:
            headers, _rule, *rows = ([cell.strip() for cell in _cells(line)] for line in group)
            cells = tuple(tuple(row) for row in rows)
            tables.append(Table(headers=tuple(headers), rows=cells, caption=path.stem))
    return tables


def _cells(line: str) -> list[str]:
    return re.split(r"(?<!\\)\|", line.strip())[1:-1]


def _rendered(table: Table, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "path",
    # The courses' page is prose, and no command prints its tables.
    [path for path in sorted(GENERATED.glob("*.md")) if _tables(path) and path.stem != "course"],
    ids=lambda path: path.stem,
)
def test_a_table_of_the_manual_fits(path: pathlib.Path, width: int) -> None:
    for table in _tables(path):
        shown = _rendered(table, width)
        assert max(map(cell_len, shown.splitlines())) <= width
        words = {
            word for row in (table.headers, *table.rows) for cell in row for word in cell.split()
        }
        found = set(shown.split())
        assert {word for word in words if len(word) <= _LONGEST_WORD} <= found


def test_names_from_elsewhere_reach_no_terminal_and_no_spreadsheet() -> None:
    """Records may come from somebody else, with escape sequences and formulas in their names."""
    names = {"model": "=HYPERLINK(1)\x1b]0;title\x07", "device": "-1"}
    hostile = make_record("step", {"time_s": 1.0}, **names)
    table = Table(headers=("a",), rows=(("\x1b[2J",),), caption="\x1b", notes=("\x07",))
    for text in (render_markdown(table), render_csv([hostile]), str(table)):
        assert not set("\x1b\x07") & set(text)
    assert "'=HYPERLINK(1)" in render_csv([hostile])
