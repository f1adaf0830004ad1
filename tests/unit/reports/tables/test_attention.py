from typing import Any

from paceline.records import Record
from paceline.reports.tables.attention import implementations_table, kernels_table
from tests.unit.record_factory import attention_record, make_record


def kernel(mask: str, registers: float, outcome: str = "ok") -> Record:
    unused = ("spill_bytes", "matrix_instructions", "worst_intensity", "best_intensity")
    numbers = dict.fromkeys(unused, 0.0) | {"registers": registers, "shared_bytes": 2048.0}
    numbers |= {"occupancy": 0.125, "worst_ceiling": 1.0}
    case: dict[str, Any] = {"kernel": "forward", "architecture": "sm90", "head_dim": 64}
    case |= {"block_queries": 128, "block_keys": 64, "num_warps": 8, "num_stages": 3}
    return make_record("kernel", numbers, outcome, mask=mask, **case)


def test_implementations_stand_side_by_side() -> None:
    cases = (("naive", 128, "ok"), ("tiled", 128, "ok"), ("naive", 256, "out_of_memory"))
    table = implementations_table(
        [
            attention_record(context, outcome=outcome, implementation=implementation)
            for implementation, context, outcome in cases
        ]
    )
    assert table.headers[3:5] == ("naive: forward, backward (ms)", "tiled: forward, backward (ms)")
    assert table.headers[5:] == ("naive: peak", "tiled: peak")
    assert [row[2] for row in table.rows] == ["128", "256"]
    assert table.rows[1][3:] == ("out of memory", "-", "-", "-")


def test_variants_of_a_kernel_become_ranges() -> None:
    (row,) = kernels_table([kernel("causal", 100.0), kernel("full", 120.0)]).rows
    assert row[:7] == ("sm90", "64", "forward", "128x64", "8", "3", "100 to 120")
    assert row[8] == "2"
    assert row[10] == "12%"


def test_a_kernel_that_did_not_compile_is_told() -> None:
    table = kernels_table([kernel("causal", 100.0), kernel("full", 0.0, "failed")])
    assert table.rows[0][6] == "failed"
    assert table.caption == "mask causal and full"
    assert table.notes == ("a reason",)
