"""Tests that the numbers of the time and memory of sharding follow from the records."""

from typing import Any

import pytest

from paceline.course.calculated import zero_stages
from paceline.course.parallel import sharded_memory, step_against_unsharded
from paceline.records import Record
from tests.unit.course.report_cases import STEADY, check, make_record

GIB = 2**30
PARTS = ("parameters", "gradients", "optimizer_state", "buffers", "activations")
PEAKS = {"after_init": 1, "before_step": 4, "after_step": 3}
NUM_PARAMETERS = 1_998_235_200
"""Parameters of xl."""


def _record(strategy: str, step: float = 1.0, spread: Any = STEADY, **options: Any) -> Record:
    """Returns a step with peaks of 1, 4 and 3 GiB per second of step time, and a given state."""
    metrics: dict[str, Any] = {
        "step_time_s": [step * factor for factor in spread],
        "optimizer_time_s": [step**2 / 8 * factor for factor in spread],
    }
    for instant, peak in PEAKS.items():
        metrics[f"peak_{instant}_bytes"] = step * peak * GIB
        metrics |= dict.fromkeys((f"{instant}_{part}_bytes" for part in PARTS), GIB / 2)
        metrics[f"{instant}_optimizer_state_bytes"] = options.get("state", 2 * GIB)
    case = {"bucket_size_mb": None, "world_size": options.get("world_size", 4)}
    return make_record("optimizer", metrics, strategy=strategy, **case)


def test_time() -> None:
    names = ("torch_ddp", "zero1")
    for step, spread, samples in ((1.2, STEADY, 7), (1.8, (1.0, 1.0), 2)):
        pair = [_record(names[0], 1.0, spread), _record(names[1], step, spread)]
        figures: dict[str, Any] = {"step_ratio": step, "optimizer_ratio": step**2}
        figures |= {"world_size": 4}
        figures |= {"says": (f"step with {names[1]} takes", f"samples: {samples})")}
        check(step_against_unsharded, pair, {"step_against_unsharded": figures})
    check(step_against_unsharded, [_record(name, world_size=1) for name in names], {})


@pytest.mark.parametrize(
    ("predicted", "figure"), [([], None), ([3.9, 3.3], 3.3 * GIB), ([3.9, 2.5], 2.5 * GIB)]
)
@pytest.mark.usefixtures("no_pictures")
def test_memory(predicted: list[float], figure: float | None) -> None:
    records = [_record("torch_ddp"), _record("zero2", 0.8, state=GIB / 2)]
    for record, peak in zip(records[: len(predicted)], predicted, strict=True):
        case = {**record.case, "predicts": "optimizer"}
        records.append(make_record("prediction", {"peak_before_step_bytes": peak * GIB}, **case))
    peak = PEAKS["before_step"] * GIB
    expected = {"peak_before_step_bytes": 0.8 * peak, "unsharded_peak_before_step_bytes": peak}
    figures: dict[str, Any] = {"peak_share": 0.8, "says": "With zero2"}
    figures |= {"before_step_optimizer_state_bytes": GIB / 2}
    figures |= {"unsharded_before_step_optimizer_state_bytes": 2 * GIB}
    figures |= {"predicted_peak_before_step_bytes": figure}
    check(sharded_memory, records, {"sharded_memory": {**expected, **figures}})


@pytest.mark.usefixtures("no_pictures")
def test_memory_without_sharding_alone() -> None:
    figures = {"peak_share": 1, "says": "the optimizer state takes 2.00 GiB"}
    check(sharded_memory, [_record("torch_ddp")], {"sharded_memory": figures})


def test_the_states_and_the_volume_of_every_stage() -> None:
    sizes = {"unsharded_bytes": 16 * NUM_PARAMETERS, "sharded_bytes": 12 * NUM_PARAMETERS}
    (block,) = check(zero_stages, [], {"zero_stages": sizes})
    totals = ["29.78 GiB", "22.33 GiB", "18.61 GiB", "14.89 GiB"]
    assert [row[5] for row in block.tables[0].rows] == totals
    assert [row[-1] for row in block.tables[0].rows] == ["2 Ψ", "3 Ψ", "2 Ψ", "3 Ψ"]
