import pathlib

import pytest

from paceline.core.errors import UsageError
from paceline.records import RecordStore
from paceline.records.kinds import PREDICTION
from paceline.training.plan import read_plan
from tests.unit.record_factory import make_record


def _write(path: pathlib.Path, *cases: tuple[str, int, float]) -> pathlib.Path:
    for strategy, batch, seconds in cases:
        RecordStore(path).append(
            make_record(
                PREDICTION,
                {"step_time_s": seconds},
                predicts="ddp",
                model="bytes-34M",
                batch=batch,
                context=128,
                world_size=2,
                strategy=strategy,
                bucket_size_mb=25.0 if strategy == "bucketed" else None,
            )
        )
    return path


def test_the_fastest_prediction_is_followed(tmp_path: pathlib.Path) -> None:
    path = _write(tmp_path / "plan.json", ("flat", 4, 1.0), ("bucketed", 4, 0.8), ("flat", 2, 0.75))
    plan = read_plan(path)
    assert plan.world_size == 2
    assert plan.step_time_s == 0.8
    assert plan.changes == (
        'model.preset="bytes-34M"',
        "data.context_length=128",
        "training.micro_batch_size=4",
        "training.batch_size=8",
        'parallel.strategy="bucketed"',
        "parallel.bucket_size_mb=25.0",
    )


def test_a_file_without_predictions_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plan.json"
    RecordStore(path).append(make_record("ddp", {"step_time_s": 1.0}))
    with pytest.raises(UsageError, match="no predicted step"):
        read_plan(path)
