import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import (
    BatchShape,
    Estimate,
    ModelShape,
    ParallelLayout,
    Plan,
    model_preset,
    precision_preset,
)
from paceline.core.errors import RecordError
from paceline.core.presets import preset_names
from paceline.records import decode_plan, encode_plan

PLAN = Plan(
    model=model_preset("llama3-405B"),
    batch=BatchShape(num_sequences=1, context_length=8192, accumulation_steps=4),
    precision=precision_preset("bfloat16"),
    layout=ParallelLayout(
        replicate=16, shard=8, tensor=8, pipeline=16, sharding="optimizer", bucket_size_mb=25.0
    ),
    hardware="h100-sxm",
    predictions={"step_time_s": Estimate(value=10.0, low=9.0, high=12.0)},
)


@given(
    st.sampled_from(preset_names()),
    st.integers(1, 16_384),
    st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False), max_size=3),
)
def test_plans_come_back_as_they_were(
    name: str, replicate: int, predictions: dict[str, float]
) -> None:
    plan = Plan(
        model=model_preset(name),
        batch=BatchShape(num_sequences=1, context_length=2048),
        precision=precision_preset("float32"),
        layout=ParallelLayout(replicate=replicate),
        hardware="h100-sxm",
        predictions={key: Estimate(value=value) for key, value in predictions.items()},
    )
    assert decode_plan(encode_plan(plan)) == plan


def test_a_trillion_parameters_on_sixteen_thousand_ranks() -> None:
    plan = Plan(
        model=ModelShape(
            vocab_size=256_000, d_model=25600, d_ff=102_400, num_layers=128, num_heads=160
        ),
        batch=PLAN.batch,
        precision=PLAN.precision,
        layout=ParallelLayout(replicate=32, tensor=8, pipeline=64),
        hardware="b200-sxm",
    )
    assert plan.layout.world_size == 16_384
    assert decode_plan(encode_plan(plan)) == plan


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda raw: raw.update(colour="red"), r"`\$\.colour`"),
        (lambda raw: raw["layout"].update(axis=2), r"`\$\.layout\.axis`"),
        (lambda raw: raw["predictions"]["step_time_s"].update(p=1), r"predictions\.step_time_s\.p"),
        (lambda raw: raw["model"].update(d_model="wide"), r"\$\.model\.d_model"),
        (lambda raw: raw["model"].update(num_heads=7), "not divisible"),
        (lambda raw: raw.pop("hardware"), "hardware"),
        (lambda raw: raw["layout"].update(tensor=0), "tensor"),
    ],
)
def test_every_defect_names_source_and_field(change: Any, complaint: str) -> None:
    raw = json.loads(encode_plan(PLAN))
    change(raw)
    with pytest.raises(RecordError, match=rf"plan\.json: not a valid plan: .*{complaint}"):
        decode_plan(json.dumps(raw).encode(), "plan.json")


def test_not_json_at_all() -> None:
    for garbage in (b"", b"{", b"\xff\xfe", b"[1]", b"null"):
        with pytest.raises(RecordError, match="not a valid plan"):
            decode_plan(garbage)
