"""Tests of the committed comparison of forecasts with an accelerator's allocator."""

import dataclasses
import statistics

import pytest

from paceline.accounting.memory.activations import Checkpointing
from paceline.accounting.memory.step import step_memory
from paceline.core.specs import BatchShape, precision_preset
from paceline.core.strategies import find_strategy
from paceline.records import Record
from paceline.records.schema import model_of_case
from studies.harness.docs import read
from studies.planner.memory_figures import device_memory_table

_MOST, _MEDIAN = 0.01, 0.005


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return read("device-memory")


def _ratio(record: Record) -> float:
    return record.metrics["predicted_bytes"].value / record.metrics["peak_bytes"].value


def _checkpointing(record: Record) -> Checkpointing:
    return "full" if record.case["activation_checkpointing"] == "full" else "none"


def test_recorded_forecasts_are_within_one_percent(records: list[Record]) -> None:
    ratios = [_ratio(record) for record in records]
    assert len(ratios) >= 120
    assert max(abs(ratio - 1) for ratio in ratios) <= _MOST
    assert abs(statistics.median(ratios) - 1) <= _MEDIAN


def test_todays_formulas_give_the_recorded_peaks(records: list[Record]) -> None:
    plain = [record for record in records if not record.case["layout"]]
    assert len(plain) >= 60
    for record in plain:
        case = record.case
        shape = model_of_case(case)
        assert shape is not None
        length = int(str(case["context"]))
        shape = dataclasses.replace(shape, max_context_length=length)
        batch = BatchShape(
            num_sequences=int(str(case["batch"])),
            context_length=length,
            accumulation_steps=int(str(case["passes"])),
        )
        memory = step_memory(
            shape,
            batch,
            precision_preset(str(case["precision"])),
            find_strategy(str(case["strategy"])),
            int(str(case["world_size"])),
            activation_checkpointing="full"
            if case["activation_checkpointing"] == "full"
            else "none",
            on_accelerator=True,
        )
        peak = record.metrics["peak_bytes"].value
        assert memory["before_step"].total == pytest.approx(peak, rel=_MOST), case


def test_the_table_names_the_ratio_that_is_farthest_from_one(records: list[Record]) -> None:
    *rows, together = device_memory_table(records).rows
    assert together[1] == str(len(records)) == str(sum(int(row[1]) for row in rows))
    farthest = max(map(_ratio, records), key=lambda ratio: abs(ratio - 1))
    assert together[3] == f"{farthest:.4f}"
