"""Tests of the numbers of steps: phases and sizes, warm-up, precision, compilation."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from paceline.course import steps
from paceline.records import Metric, Record
from tests.unit.course.report_cases import FEW, check, question_of
from tests.unit.record_factory import step_record

STEADY = (0.99, 1.0, 1.01, 1.0, 0.995, 1.005)
SIZES = ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "head_dim")
MODEL: dict[str, Any] = dict(zip(SIZES, (100, 64, 128, 2, 2, 2, 32), strict=True))
MODEL |= {"tied_embeddings": False, "compile": "none", "activation_checkpointing": "none"}
MODEL |= {"float32_matmul_precision": "highest", "optimizer": "adamw", "hardware": "laptop"}
CUSTOM, LARGE = {"model": "custom"}, {"num_layers": 20, "model": "custom"}
H100, A100 = {"hardware": "h100-sxm"}, {"hardware": "a100-sxm-80gb"}
TF32, HALF = {"float32_matmul_precision": "high"}, {"precision": "bfloat16"}
WHOLE, FULL = {"compile": "whole"}, {"activation_checkpointing": "full", "num_layers": 20}
LOST = step_record(outcome="out_of_memory", **{**MODEL, **LARGE})
pytestmark = pytest.mark.usefixtures("no_pictures")


def _step(
    forward: float = 0.1,
    backward: float = 0.2,
    optimizer: float = 0.1,
    *,
    factors: Sequence[float] = STEADY,
    optimizer_factors: Sequence[float] | None = None,
    **case: Any,
) -> Record:
    """Returns a step with samples of time x factor; 0.1 s of the step are outside its phases."""
    times = {"forward": forward, "backward": backward, "optimizer": optimizer}
    times["step"] = sum(times.values()) + 0.1
    record = step_record(**{**MODEL, **case})
    metrics = dict(record.metrics)
    for name, seconds in times.items():
        spread = (name == "optimizer" and optimizer_factors) or factors
        metrics[f"{name}_time_s"] = Metric.from_samples([seconds * factor for factor in spread])
    return msgspec.structs.replace(record, metrics=metrics)


def _pair(case: Any) -> list[Record]:
    return [_step(**case), _step(**case, **HALF)]


SIZED, HALVED, COMPILED = steps.step_time, steps.low_precision, steps.compiled_step
STEP, LOW, WHOLE_STEP = "step_time", "low_precision", "compiled_step"
UNSTEADY = [_step(optimizer_factors=(0.5, 1.0, 2.5)), _step(**LARGE)]
FASTER = [_step(0.3, 0.4, 0.2, **LARGE), _step(**CUSTOM)]
PAIR = [_step(0.2, 0.4), _step(0.2, 0.1, **HALF)]
GAINED = [_step(0.2), _step(**WHOLE)]
ONE = {"factors": (1.0,)}
SGD = msgspec.structs.replace(_step(), case={**_step().case, "optimizer": "sgd"})
# Shapes that share a name are not compared with each other.
NAMESAKES = [_step(1.0, 2.0, **LARGE), _step(**CUSTOM), LOST, _step(0.25, 0.5, **LARGE, **HALF)]
NAMESAKES += [_step(0.05, 0.1, **CUSTOM, **HALF)]


@pytest.mark.parametrize(
    ("finds", "records", "expected"),
    [
        # The share is of the measured step, not of the sum of its phases.
        (SIZED, [_step()], {"backward_share": 0.4, "step_time_s": 0.5}),
        (SIZED, [_step(0.3)], {"backward_share": 0.2 / 0.7}),
        (SIZED, [_step(), LOST], {"says": "step of small takes"}),
        (SIZED, [_step(0.1, 0.244)], {"backward_ratio": 2.44, "flops_ratio": 2}),
        (SIZED, [_step(0.1, 0.29, **FULL)], {"backward_ratio": 2.9, "flops_ratio": 2.994}),
        (SIZED, [_step(**ONE)], {"spread_share": None}),
        # The phase with the largest spread, over all models.
        (SIZED, UNSTEADY, {"spread_share": 1.041, "says": "of the median: optimizer of small."}),
        (SIZED, [_step()], {"spread_share": 0.00707}),
        # The largest model of the largest group of comparable steps, in float32.
        (SIZED, FASTER, {"step_time_s": 1.0, "says": "step of custom (835 k parameters)"}),
        (SIZED, [*FASTER, _step(batch=8)], {"step_time_s": 1.0}),
        (SIZED, [_step(), _step(**HALF), _step(0.3, **HALF, num_layers=3)], {"step_time_s": 0.5}),
        (SIZED, [_step()], {"optimizer_bytes_per_s": 280 * 95_040, "memory_bytes_per_s": None}),
        (SIZED, [_step(**H100)], {"memory_bytes_per_s": 3.35e12}),
        (SIZED, [_step(optimizer=1e-7, **H100)], {"optimizer_bytes_per_s": 28 * 95_040 / 1e-7}),
        (SIZED, [SGD], {"optimizer_bytes_per_s": None}),
        (HALVED, PAIR, {"optimizer_share": 0.2, "float32_optimizer_share": 0.125}),
        (HALVED, PAIR, {"ratio": 0.5, "peak_ratio": None, "says": "samples: 6) as long in bfloat"}),
        (HALVED, _pair(A100), {"ratio": 1, "ratio_low": 0.933, "peak_ratio": 16}),
        (HALVED, _pair(A100 | TF32), {"peak_ratio": 2}),
        (HALVED, NAMESAKES, {"ratio": 0.25, "says": "835 k"}),
        (HALVED, NAMESAKES, {"ratio": 0.5, "says": "95 k"}),
        (COMPILED, GAINED, {"ratio": 5 / 6, "forward_ratio": 0.5, "says": "samples: 6)"}),
        (COMPILED, [_step(**ONE), _step(**ONE, **WHOLE)], {"ratio": 1, "says": FEW}),
        # There is no answer without times or without a baseline of the same model.
        (SIZED, [_step(0.0)], None),
        (SIZED, [msgspec.structs.replace(_step(), metrics={"step_time_s": Metric(value=1)})], None),
        (SIZED, [LOST], None),
        (HALVED, [_step(**CUSTOM), _step(**LARGE, **HALF)], None),
        (COMPILED, [_step(**CUSTOM), _step(**LARGE, **WHOLE)], None),
    ],
)
def test_numbers(finds: Any, records: list[Record], expected: Any) -> None:
    (name,) = question_of(finds).sentences
    check(finds, records, {name: expected} if expected else {})


@pytest.mark.parametrize(
    ("cold", "first_step"),
    [
        ((3.0, *STEADY), {"first_step_time_s": 1.5}),
        ((3.0, 1.0, 1.0), {"warmup": 0, "first_step_time_s": 1.5, "mean_s": 5 / 6}),
        ((3.0,), {"first_step_time_s": 1.5, "std_s": None}),
    ],
)
def test_warmup(cold: Sequence[float], first_step: Any) -> None:
    silent = _step(factors=(9.0, 9.0))
    del silent.case["warmup"]
    records = [silent, _step(warmup=5), _step(factors=cold, warmup=0)]
    warm = {"warmup": 5, "mean_s": 0.5, "std_s": 0.003536}
    for expected in ({**first_step, "says": "After 0"}, warm):
        check(steps.warmup, records, {"warmup": expected})
    check(steps.warmup, records[:2], {})
