from typing import Any

import msgspec

from paceline.records import Metric, Record
from paceline.reports.tables.attention import implementations_table, kernels_table
from tests.unit.reports.factory import attention_record


def record(implementation: str, context: int, outcome: str = "ok") -> Record:
    return attention_record(
        context, outcome=outcome, implementation=implementation, dtype="float32"
    )


def kernel(mask: str, registers: float, outcome: Any = "ok") -> Record:
    metrics = dict.fromkeys(
        ("spill_bytes", "matrix_instructions", "worst_intensity", "best_intensity"), 0.0
    ) | {"registers": registers, "shared_bytes": 2048.0, "occupancy": 0.125, "worst_ceiling": 1.0}
    return msgspec.structs.replace(
        record("tiled", 128),
        kind="kernel",
        case={
            "kernel": "forward",
            "architecture": "sm90",
            "dtype": "bfloat16",
            "head_dim": 64,
            "mask": mask,
            "lengths": "even",
            "group": 1,
            "triton": "3.7.1",
            "block_queries": 128,
            "block_keys": 64,
            "num_warps": 8,
            "num_stages": 3,
        },
        metrics={name: Metric(value=value) for name, value in metrics.items() if outcome == "ok"},
        outcome=outcome,
        reason=None if outcome == "ok" else "the compiler crashed",
    )


def test_implementations_stand_side_by_side() -> None:
    table = implementations_table(
        [record("naive", 128), record("tiled", 128), record("naive", 256, "out_of_memory")]
    )
    assert table.headers[3:] == (
        "naive: forward, backward (ms)",
        "tiled: forward, backward (ms)",
        "naive: peak",
        "tiled: peak",
    )
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
    assert table.notes == ("the compiler crashed",)
