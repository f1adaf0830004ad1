"""Tables of traced steps, from records made by hand."""

import pytest

from paceline.core.errors import UsageError
from paceline.reports.tables import profile
from tests.unit.record_factory import make_record, memory_record, prediction_of

RECORDS = [
    make_record(
        "operator",
        {"own_time_s": own_time_s, "share": 0.25, "num_calls": 3, "flops": flops},
        subject="s",
        range=range_name,
        work=work,
        operator=operator,
    )
    for range_name, work, operator, own_time_s, flops in (
        ("forward", "matmul", "all", 0.2, 2e9),
        ("forward", "matmul", "aten::mm", 0.2, 2e9),
        ("optimizer", "elementwise", "all", 0.3, 0.0),
        ("attention_scores", "matmul", "all", 0.05, 1e9),
        ("attention_softmax", "softmax", "all", 0.04, 0.0),
        ("attention_values", "matmul", "all", 0.06, 1e9),
    )
]


def test_work_by_phase() -> None:
    table = profile.work_table(RECORDS, "s")
    assert table.headers == ("work", "forward: ms, share", "optimizer: ms, share")
    assert table.rows[0] == ("elementwise", "-", "300.0, 25.0%")
    assert table.rows[1] == ("matmul", "200.0, 25.0%", "-")
    with pytest.raises(UsageError, match="no trace of 'other'"):
        profile.work_table(RECORDS, "other")


def test_operators_of_a_range() -> None:
    (row,) = profile.operator_table(RECORDS, "s", "forward").rows
    assert row == ("aten::mm", "matmul", "3", "200.0", "25.0%")


def test_the_parts_of_attention() -> None:
    assert profile.attention_table(RECORDS, "s").rows == (
        ("scores", "50.0", "1 G", "20 G"),
        ("softmax", "40.0", "-", "-"),
        ("values", "60.0", "1 G", "16.7 G"),
    )


def test_operations_beside_the_formula() -> None:
    records = [*RECORDS, prediction_of(RECORDS[0], {"flops": 1.6e9})]
    assert profile.flops_table(records).rows == (("s", "forward", "2 G", "1.6 G", "1.2500"),)


def test_memory_beside_the_least_possible() -> None:
    measured = memory_record(phase="train", context=64, precision="float32")
    (row,) = profile.memory_table([measured, prediction_of(measured, {"peak_bytes": 2**20})]).rows
    assert row[:4] == ("train", "64", "float32", "6.00 MiB")
    assert row[-1] == "1.00 MiB"
