"""Tests of tables of traced steps, from handwritten records."""

import pytest

from paceline.core.errors import UsageError
from paceline.records import Record
from paceline.reports.tables import profile
from paceline.reports.tables.table import Table
from tests.unit.record_factory import make_record, memory_record, prediction_of


def _row(phase: str, work: str, own_time_s: float, flops: float, operator: str = "all") -> Record:
    metrics = {"own_time_s": own_time_s, "share": 0.25, "num_calls": 3, "flops": flops}
    return make_record("operator", metrics, subject="s", range=phase, work=work, operator=operator)


RECORDS = [_row("forward", "matmul", 0.2, 2e9), _row("forward", "matmul", 0.2, 2e9, "aten::mm")]
RECORDS += [_row("optimizer", "elementwise", 0.3, 0), _row("attention_scores", "matmul", 0.05, 1e9)]
RECORDS += [_row("attention_softmax", "softmax", 0.04, 0)]
RECORDS += [_row("attention_values", "matmul", 0.06, 1e9)]
MEASURED = memory_record(phase="train", context=64, precision="float32")
FLOPS = [*RECORDS, prediction_of(RECORDS[0], {"flops": 1.6e9})]
MEMORY = [MEASURED, prediction_of(MEASURED, {"peak_bytes": 2**20})]


@pytest.mark.parametrize(
    ("table", "rows"),
    [
        (profile.work_table(RECORDS, "s"), ["work|forward: ms, share|optimizer: ms, share"]),
        (profile.work_table(RECORDS, "s"), ["elementwise|-|300.0, 25.0%", "matmul|200.0, 25.0%|-"]),
        (profile.operator_table(RECORDS, "s", "forward"), ["aten::mm|matmul|3|200.0|25.0%"]),
        (profile.attention_table(RECORDS, "s"), ["scores|50.0|1 G|20 G", "softmax|40.0|-|-"]),
        (profile.attention_table(RECORDS, "s"), ["values|60.0|1 G|16.7 G"]),
        # Next to the FLOPs of the formula, and next to the lower bound of memory.
        (profile.flops_table(FLOPS), ["s|forward|2 G|1.6 G|1.2500"]),
        (profile.memory_table(MEMORY), [f"train|64|float32|6.00 MiB{'|1.00 MiB' * 6}"]),
    ],
)
def test_rows_in_order(table: Table, rows: list[str]) -> None:
    shown = ["|".join(row) for row in (table.headers, *table.rows)]
    assert [row for row in shown if row in rows] == rows


def test_an_unknown_trace_is_refused() -> None:
    with pytest.raises(UsageError, match="no trace of 'other'"):
        profile.work_table(RECORDS, "other")
