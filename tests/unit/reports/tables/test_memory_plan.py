"""Predicted memory as text."""

from paceline.accounting.memory.explain import StepPlan
from paceline.core import BatchShape, model_preset
from paceline.reports.tables.memory_plan import instants_text


def test_the_table_has_a_row_per_part_and_a_column_per_instant() -> None:
    instants = StepPlan(
        shape=model_preset("small"),
        batch=BatchShape(num_sequences=4, context_length=128),
        strategy="none",
    ).instants(1)
    lines = instants_text(instants).splitlines()
    assert lines[0].split("  ")[-1].strip() == "after step"
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "parameters",
        "gradients",
        "optimizer state",
        "buffers",
        "activations",
        "total",
    ]
    assert lines[1].count("490.67 MiB") == 3
