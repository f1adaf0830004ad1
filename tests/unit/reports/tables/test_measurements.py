from paceline.reports.tables.measurements import implementations_table, kernels_table
from tests.unit.record_factory import attention_record, kernel_record


def test_implementations_stand_side_by_side() -> None:
    cases = (("naive", 128, "ok"), ("tiled", 128, "ok"), ("naive", 256, "out_of_memory"))
    records = [
        attention_record(context, outcome=outcome, implementation=implementation)
        for implementation, context, outcome in cases
    ]
    table = implementations_table(records)
    assert table.headers[3:5] == ("naive: forward, backward (ms)", "tiled: forward, backward (ms)")
    assert table.headers[5:] == ("naive: peak", "tiled: peak")
    # Per pair of tokens: 1 ns in forward, 2 ns in backward, and 96 bytes.
    assert table.rows[0][2:] == ("128", *["0.0164, 0.0328"] * 2, *["1.50 MiB"] * 2)
    assert table.rows[1][2:] == ("256", "out of memory", "-", "-", "-")


def test_variants_of_a_kernel_become_ranges_and_one_that_did_not_compile_is_told() -> None:
    causal = kernel_record(100, mask="causal")
    (row,) = kernels_table([kernel_record(120, mask="full"), causal]).rows
    assert row[:7] == ("sm90", "64", "forward", "128x64", "8", "3", "100 to 120")
    assert row[7:] == ("0", "48", "8", "12%", "30", "1,500", "50% to 60%")
    table = kernels_table([causal, kernel_record(mask="full", outcome="failed")])
    assert table.rows[0][6] == "failed"
    assert table.caption == "mask causal and full"
    assert table.notes == ("a reason",)
