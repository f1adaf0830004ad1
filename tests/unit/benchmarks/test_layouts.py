import pytest

from paceline.benchmarks.layouts import layout_predictions
from paceline.core import UsageError
from paceline.core.presets import model_preset
from paceline.core.specs import BatchShape
from paceline.records import Record, join_key
from paceline.records.schema import model_case_fields
from tests.unit.predict.calibration_cases import PLACE, make_records
from tests.unit.predict.calibration_cases import make_record as make_calibrated
from tests.unit.record_factory import make_record

_PLACE = {name: value for name, value in PLACE.items() if name != "dtype"}


def _measured(layout: str, outcome: str = "ok", **changes: object) -> Record:
    shape = model_preset("bytes-6M")
    fields = model_case_fields("bytes-6M", shape, BatchShape(num_sequences=1, context_length=64))
    case = {"layout": layout, **fields, "batch_size": 8, **_PLACE, **changes}
    numbers = {"step_time_s": [1.0, 1.1], "peak_bytes": 1e8}
    return make_record("layout", numbers, outcome, baseline=layout, warmup=1, rounds=2, **case)


def _calibration() -> list[Record]:
    # A linear layer and an attention with shapes close to the model's.
    heads = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 64}
    return [
        *(each for each in make_records() if each.case["quantity"] not in ("linear", "attention")),
        make_calibrated("linear", tokens=64, inputs=256, outputs=512),
        make_calibrated("attention", batch=1, context=64, **heads, attention="sdpa"),
    ]


def test_every_measured_layout_gets_its_prediction() -> None:
    records = [_measured("replicate=2,micro=1"), _measured("pipeline=2,micro=1")]
    records.append(_measured("tensor=2,micro=1", "failed"))
    predictions = list(layout_predictions(records, _calibration()))
    assert [join_key(record) for record in predictions] == [join_key(r) for r in records[:2]]
    for record in predictions:
        parts = {name: metric.value for name, metric in record.metrics.items()}
        total, memory = parts.pop("step_time_s"), parts.pop("peak_bytes")
        assert sum(parts.values()) == pytest.approx(total)
        assert memory > 0
    replicas, stages = (record.metrics for record in predictions)
    assert "bubble_s" not in replicas
    assert stages["bubble_s"].value > 0
    assert stages["peak_bytes"].value < replicas["peak_bytes"].value


def test_a_schedule_that_the_planner_lacks_gets_no_prediction() -> None:
    records = [_measured("pipeline=2,zb=1,micro=1"), _measured("pipeline=2,micro=1")]
    predictions = list(layout_predictions(records, _calibration()))
    assert [record.case["layout"] for record in predictions] == ["pipeline=2,micro=1"]


def test_a_calibration_of_other_ranks_is_refused() -> None:
    records = [_measured("replicate=4,micro=1", world_size=4)]
    with pytest.raises(UsageError, match="measured with world_size 4, num_hosts 1, backend gloo"):
        list(layout_predictions(records, _calibration()))
