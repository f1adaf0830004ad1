import dataclasses

import pytest

from paceline.core import (
    BatchShape,
    Estimate,
    ModelShape,
    ParallelLayout,
    Plan,
    Precision,
    UsageError,
    precision_preset,
)
from paceline.core.errors import ShapeError
from paceline.core.specs import bytes_per_element

SHAPE = ModelShape(vocab_size=100, d_model=64, d_ff=128, num_layers=2, num_heads=4)


def test_widths_are_derived_from_heads() -> None:
    shape = dataclasses.replace(SHAPE, num_kv_heads=2)
    assert (shape.head_width, shape.attention_width, shape.key_value_width) == (16, 64, 32)
    assert dataclasses.replace(SHAPE, head_dim=32).attention_width == 128


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        ({"d_model": 0}, "d_model"),
        ({"d_ff": -1}, "d_ff"),
        ({"num_layers": 0}, "num_layers"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"num_heads": 5}, "not divisible"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"head_dim": 7}, "even"),
        ({"norm": "batchnorm"}, "norm"),
        ({"feed_forward": "relu"}, "feed_forward"),
        ({"rope_theta": 0.0}, "rope_theta"),
    ],
)
def test_impossible_shapes_name_the_field(change: dict[str, object], culprit: str) -> None:
    with pytest.raises(ShapeError, match=culprit):
        dataclasses.replace(SHAPE, **change)  # type: ignore[arg-type]


def test_a_shape_may_lack_attention_and_vocabulary() -> None:
    shape = dataclasses.replace(SHAPE, num_heads=0, vocab_size=0, positions="none")
    assert shape.attention_width == 0
    assert shape.head_width == 0


def test_batch_tokens() -> None:
    batch = BatchShape(num_sequences=4, context_length=128, accumulation_steps=3)
    assert batch.tokens_per_pass == 512
    assert batch.tokens_per_step == 1536
    with pytest.raises(ShapeError, match="accumulation_steps"):
        BatchShape(num_sequences=4, context_length=128, accumulation_steps=0)


def test_precision_names_are_what_people_mean() -> None:
    assert precision_preset("float32") == Precision()
    assert precision_preset("bfloat16") == Precision(compute="bfloat16", autocast=True)
    with pytest.raises(UsageError, match=r"int3.*float32"):
        precision_preset("int3")
    with pytest.raises(ShapeError, match="compute"):
        Precision(compute="int4")  # type: ignore[arg-type]
    assert [bytes_per_element(name) for name in ("float64", "tfloat32", "float8")] == [8, 4, 1]


def test_layout_sizes_multiply() -> None:
    layout = ParallelLayout(
        replicate=2, shard=8, tensor=8, pipeline=16, context=8, sharding="parameters"
    )
    assert layout.data_parallel == 16
    assert layout.world_size == 16384


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        ({"tensor": 0}, "tensor"),
        ({"shard": 2}, "sharding"),
        ({"sharding": "zero"}, "sharding"),
        ({"activation_checkpointing": "some"}, "activation_checkpointing"),
        ({"bucket_size_mb": 0.0}, "bucket_size_mb"),
    ],
)
def test_impossible_layouts_name_the_field(arguments: dict[str, object], culprit: str) -> None:
    with pytest.raises(ShapeError, match=culprit):
        ParallelLayout(**arguments)  # type: ignore[arg-type]


def test_estimates_hold_their_value() -> None:
    Estimate(value=1.0, low=0.5, high=2.0)
    for bad in ({"low": 2.0}, {"high": 0.5}, {"high": float("inf")}):
        with pytest.raises(ShapeError):
            Estimate(value=1.0, **bad)


def test_a_plan_counts_the_tokens_of_all_ranks() -> None:
    plan = Plan(
        model=SHAPE,
        batch=BatchShape(num_sequences=1, context_length=8192, accumulation_steps=2),
        precision=Precision(),
        layout=ParallelLayout(replicate=4, tensor=8),
        hardware="h100-sxm",
    )
    assert plan.tokens_per_step == 8192 * 2 * 4
