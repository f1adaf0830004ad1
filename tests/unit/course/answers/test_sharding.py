"""Findings in the time and memory of sharding follow from the records."""

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.course.answers import sharding
from paceline.course.answers.sharding import answer_memory, answer_time
from paceline.records import Record
from paceline.reports.evidence.groups import Evidence
from tests.unit.course.report_cases import check, make_record, no_drawing

STEADY = (1.0, 0.999, 1.001, 1.0, 1.0, 1.0, 1.0)
GIB = 2**30
PARTS = ("parameters", "gradients", "optimizer_state", "buffers", "activations")


def _record(
    strategy: str,
    step: float = 1.0,
    *,
    spread: Sequence[float] = STEADY,
    world_size: int = 4,
    state: float = 2 * GIB,
) -> Record:
    """A step whose peaks are 1, 4 and 3 GiB for each of its seconds, and its state as given."""
    metrics: dict[str, Any] = {
        "step_time_s": [step * factor for factor in spread],
        "optimizer_time_s": [step**2 / 8 * factor for factor in spread],
    }
    for instant, peak in (("after_init", 1), ("before_step", 4), ("after_step", 3)):
        metrics[f"peak_{instant}_bytes"] = step * peak * GIB
        metrics |= dict.fromkeys((f"{instant}_{part}_bytes" for part in PARTS), GIB / 2)
        metrics[f"{instant}_optimizer_state_bytes"] = state
    case = {"strategy": strategy, "bucket_size_mb": None, "world_size": world_size}
    return make_record("optimizer", metrics, **case)


@pytest.mark.parametrize(
    ("step", "spread", "says"),
    [
        (1.2, STEADY, "more"),
        (0.8, STEADY, "less"),
        (1.02, STEADY, "alike"),
        (1.8, (1.0, 1.0), "unknown: too few samples, 2"),
    ],
)
def test_the_time_of_sharding_is_judged_by_its_samples(
    step: float, spread: Sequence[float], says: str
) -> None:
    pair = [_record("torch_ddp", spread=spread), _record("sharded_optimizer", step, spread=spread)]
    times = {"step_ratio": step, "optimizer_ratio": step**2, "step_s": step}
    figures = {**times, "unsharded_step_s": 1.0, "says": ("sharded_optimizer", says)}
    expected = {"step_against_unsharded": figures, "sharding_tradeoff": {"world_size": 4}}
    check(answer_time(Evidence.of(pair)), expected)


def test_one_rank_shards_no_work() -> None:
    pair = [_record(name, world_size=1) for name in ("torch_ddp", "sharded_optimizer")]
    assert answer_time(Evidence.of(pair)) == ()


@pytest.mark.parametrize(
    ("predicted", "figures"),
    [
        ({}, None),
        ({"torch_ddp": 3.9, "sharded": 3.3}, {"predicted_bytes": 3.3 * GIB, "says": "alike (-3%)"}),
        ({"torch_ddp": 3.9, "sharded": 2.5}, {"peak_bytes": 3.2 * GIB, "says": "more (+28%)"}),
    ],
)
def test_memory_is_told_by_instant_and_held_against_predictions(
    monkeypatch: pytest.MonkeyPatch,
    predicted: dict[str, float],
    figures: dict[str, Any] | None,
) -> None:
    monkeypatch.setattr(sharding, "draw_picture", no_drawing)
    records = [_record("torch_ddp"), _record("sharded", 0.8, state=GIB / 2)]
    for record in records[:2]:
        peak = predicted.get(str(record.case["strategy"]))
        metrics = {} if peak is None else {"peak_before_step_bytes": peak * GIB}
        case = {**record.case, "predicts": "optimizer"}
        records += [make_record("prediction", metrics, **case)] if metrics else []
    instants = {"after_init_bytes": GIB, "before_step_bytes": 4 * GIB, "after_step_bytes": 3 * GIB}
    sharded = {"before_step_bytes": 3.2 * GIB, "peak_share": 0.8, "state_bytes": GIB / 2}
    expected = {
        "unsharded_memory": {**instants, "largest_bytes": 2 * GIB, "says": "optimizer state is"},
        "sharded_memory": {**sharded, "unsharded_state_bytes": 2 * GIB},
        "peak_prediction": figures,
    }
    check(answer_memory(Evidence.of(records)), expected)
