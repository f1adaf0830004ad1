import dataclasses
import pathlib

import pytest

from paceline.core import BatchShape, Estimate, ParallelLayout, Plan, model_preset, precision_preset
from paceline.core.errors import PacelineError, UsageError
from paceline.records import RecordStore, encode_plan
from paceline.records.kinds import PREDICTION
from paceline.training.config import ParallelConfig
from paceline.training.forecast import layout_of
from paceline.training.plan import read_plan
from paceline.training.toml_config import decode_config
from tests.unit.record_factory import make_record

TEXT = 'out = "run"\n[[data.sources]]\nplace = "tokens"\n'


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
                bucket_size_mb=25.0 if strategy == "ddp" else None,
            )
        )
    return path


def test_the_fastest_prediction_is_followed(tmp_path: pathlib.Path) -> None:
    path = _write(tmp_path / "plan.json", ("flat", 4, 1.0), ("ddp", 4, 0.8), ("flat", 2, 0.75))
    plan = read_plan(path)
    assert plan.world_size == 2
    assert plan.step_time_s == 0.8
    assert plan.settings == {
        "model": {"preset": "bytes-34M"},
        "data": {"context_length": 128},
        "training": {"micro_batch_size": 4, "batch_size": 8},
        "parallel": {"strategy": "ddp", "bucket_size_mb": 25.0},
    }


def test_a_file_without_predictions_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plan.json"
    RecordStore(path).append(make_record("ddp", {"step_time_s": 1.0}))
    with pytest.raises(UsageError, match="no predicted step"):
        read_plan(path)


def _searched(path: pathlib.Path, layout: ParallelLayout) -> pathlib.Path:
    plan = Plan(
        model=model_preset("bytes-6M"),
        batch=BatchShape(num_sequences=2, context_length=128, accumulation_steps=4),
        precision=precision_preset("bfloat16"),
        layout=layout,
        hardware="h100-sxm",
        predictions={"step_time_s": Estimate(value=0.5)},
    )
    path.write_bytes(encode_plan(plan))
    return path


def test_a_searched_plan_is_followed(tmp_path: pathlib.Path) -> None:
    layout = ParallelLayout(shard=4, sharding="gradients", activation_checkpointing="full")
    plan = read_plan(_searched(tmp_path / "plan.json", layout))
    assert (plan.world_size, plan.step_time_s) == (4, 0.5)
    config = decode_config(TEXT, settings=plan.settings)
    shape = model_preset("bytes-6M")
    assert config.model.shape == dataclasses.replace(shape, num_kv_heads=4, head_dim=64)
    assert (config.model.num_layers, config.model.num_kv_heads) == (6, 4)
    assert config.model.activation_checkpointing == "full"
    assert config.data.context_length == 128
    step = config.training
    assert (step.micro_batch_size, step.batch_size, step.precision) == (2, 32, "bfloat16")
    assert config.parallel.strategy == "zero2"


def test_a_plan_changes_the_config_and_set_changes_the_plan(tmp_path: pathlib.Path) -> None:
    plan = read_plan(_searched(tmp_path / "plan.json", ParallelLayout(replicate=2)))
    text = f"{TEXT}[training]\nbatch_size = 1\nsteps = 70\n"
    config = decode_config(text, ["training.micro_batch_size=1"], settings=plan.settings)
    step = config.training
    assert (step.steps, step.batch_size, step.micro_batch_size) == (70, 16, 1)


def test_every_axis_of_a_searched_plan_is_followed(tmp_path: pathlib.Path) -> None:
    layout = ParallelLayout(
        replicate=2,
        shard=2,
        context=2,
        tensor=2,
        pipeline=2,
        sharding="parameters",
        sequence_parallel=True,
        pipeline_interleave=2,
    )
    plan = read_plan(_searched(tmp_path / "plan.json", layout))
    assert plan.world_size == 32
    config = decode_config(TEXT, settings=plan.settings)
    assert config.training.batch_size == 32
    assert config.parallel == ParallelConfig(
        strategy="fsdp",
        tensor=2,
        sequence_parallel=True,
        context=2,
        pipeline=2,
        interleave=2,
        replicate=2,
    )
    assert layout_of(config, plan.world_size) == layout


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(tensor=8),
        ParallelLayout(pipeline=8),
        ParallelLayout(tensor=2, shard=2, sharding="optimizer"),
        ParallelLayout(replicate=2, activation_checkpointing="selective"),
    ],
)
def test_a_layout_that_cannot_run_is_refused(
    tmp_path: pathlib.Path, layout: ParallelLayout
) -> None:
    with pytest.raises(UsageError, match="--runnable finds a layout that runs"):
        read_plan(_searched(tmp_path / "plan.json", layout))


def test_a_plan_that_is_not_there_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(PacelineError, match="plan search --runnable --out writes a plan"):
        read_plan(tmp_path / "plan.json")
