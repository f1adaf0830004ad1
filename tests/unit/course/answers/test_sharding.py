"""Tests that findings about the time and memory of sharding follow from the records."""

from typing import Any

import pytest

from paceline.course.answers.sharding import answer_memory, answer_time, calculate_states
from paceline.records import Record
from paceline.reports.evidence.groups import Evidence
from tests.unit.course.report_cases import STEADY, check, make_record

GIB = 2**30
PARTS = ("parameters", "gradients", "optimizer_state", "buffers", "activations")


def _record(strategy: str, step: float = 1.0, spread: Any = STEADY, **options: Any) -> Record:
    """Returns a step with peaks of 1, 4 and 3 GiB per second of step time, and a given state."""
    metrics: dict[str, Any] = {
        "step_time_s": [step * factor for factor in spread],
        "optimizer_time_s": [step**2 / 8 * factor for factor in spread],
    }
    for instant, peak in (("after_init", 1), ("before_step", 4), ("after_step", 3)):
        metrics[f"peak_{instant}_bytes"] = step * peak * GIB
        metrics |= dict.fromkeys((f"{instant}_{part}_bytes" for part in PARTS), GIB / 2)
        metrics[f"{instant}_optimizer_state_bytes"] = options.get("state", 2 * GIB)
    case = {"bucket_size_mb": None, "world_size": options.get("world_size", 4)}
    return make_record("optimizer", metrics, strategy=strategy, **case)


def test_time() -> None:
    names = ("torch_ddp", "sharded_optimizer")
    for step, spread, verdict in ((1.2, STEADY, "more"), (1.8, (1.0, 1.0), "from only 2 samples")):
        pair = [_record(names[0], 1.0, spread), _record(names[1], step, spread)]
        figures = {"step_ratio": step, "optimizer_ratio": step**2, "step_s": step}
        figures |= {"unsharded_step_s": 1.0, "says": (names[1], verdict)}
        expected = {"step_against_unsharded": figures, "sharding_tradeoff": {"world_size": 4}}
        check(answer_time, pair, expected)
    check(answer_time, [_record(name, world_size=1) for name in names], {})


@pytest.mark.parametrize(
    ("predicted", "figures"),
    [
        ([], None),
        ([3.9, 3.3], {"predicted_bytes": 3.3 * GIB, "says": ("for sharded:", "within 10% (-3%)")}),
        ([3.9, 2.5], {"peak_bytes": 3.2 * GIB, "says": "more (+28%)"}),
    ],
)
@pytest.mark.usefixtures("no_pictures")
def test_memory(predicted: list[float], figures: Any) -> None:
    records = [_record("torch_ddp"), _record("sharded", 0.8, state=GIB / 2)]
    for record, peak in zip(records[: len(predicted)], predicted, strict=True):
        case = {**record.case, "predicts": "optimizer"}
        records.append(make_record("prediction", {"peak_before_step_bytes": peak * GIB}, **case))
    instants = {"after_init_bytes": GIB, "before_step_bytes": 4 * GIB, "after_step_bytes": 3 * GIB}
    sharded = {"before_step_bytes": 3.2 * GIB, "peak_share": 0.8, "state_bytes": GIB / 2}
    expected = {
        "unsharded_memory": {**instants, "largest_bytes": 2 * GIB, "says": "the optimizer state"},
        "sharded_memory": {**sharded, "unsharded_state_bytes": 2 * GIB},
        "peak_prediction": figures,
    }
    check(answer_memory, records, expected)


def test_the_states_and_the_volume_of_every_stage() -> None:
    ((table,),) = (block.tables for block in calculate_states(Evidence.of([])))
    totals = ["29.78 GiB", "22.33 GiB", "18.61 GiB", "14.89 GiB"]
    assert [row[5] for row in table.rows] == totals
    assert [row[-1] for row in table.rows] == ["2 Ψ", "3 Ψ", "2 Ψ", "3 Ψ"]
