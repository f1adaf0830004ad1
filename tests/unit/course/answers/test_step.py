"""Tests of findings about steps: phases and sizes, warm-up, precision, compilation."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from paceline.course.answers import step
from paceline.records import Metric, Record
from tests.unit.course.report_cases import FEW, check
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
    flops_per_s: float = 1e9,
    **case: Any,
) -> Record:
    """Returns a step with samples of time x factor; 0.1 s of the step are outside its phases."""
    times = {"forward": forward, "backward": backward, "optimizer": optimizer}
    times["step"] = sum(times.values()) + 0.1
    record = step_record(**{**MODEL, **case})
    metrics = {**record.metrics, "model_flops_per_s": Metric(value=flops_per_s)}
    for name, seconds in times.items():
        spread = (name == "optimizer" and optimizer_factors) or factors
        metrics[f"{name}_time_s"] = Metric.from_samples([seconds * factor for factor in spread])
    return msgspec.structs.replace(record, metrics=metrics)


def _pair(case: Any) -> list[Record]:
    return [_step(**case), _step(**case, **HALF)]


SIZED, HALVED, COMPILED = step.answer_sizes, step.answer_precision, step.answer_compiled_step
LONGEST, BACKWARD, RATE = "backward_takes_longest", "backward_to_forward", "rate_by_size"
SPREAD, OPTIMIZER = "largest_spread", "optimizer_bandwidth"
BEYOND = "optimizer_exceeds_memory_bandwidth"
DTYPES, WHOLE_STEP = "bfloat16_to_float32", "compiled_to_plain_step"
UNSTEADY = [_step(optimizer_factors=(0.5, 1.0, 2.5)), _step(**LARGE)]
UNSTEADY_TEXTS = ["optimizer of small", "more st"]
SLOWER_FIRST = ["slower than all later ones.", "Leave the first step out"]
FASTER = [_step(0.3, 0.4, 0.2, **LARGE, flops_per_s=2e9), _step(**CUSTOM)]
SLOWER = [_step(**CUSTOM), _step(**LARGE, flops_per_s=5e8)]
PAIR = [_step(0.2, 0.4), _step(0.2, 0.1, **HALF)]
GAINED = [_step(0.2), _step(**WHOLE)]
ONE = {"factors": (1.0,)}
SGD = msgspec.structs.replace(_step(), case={**_step().case, "optimizer": "sgd"})
# Shapes that share a name are not compared with each other.
NAMESAKES = [_step(1.0, 2.0, **LARGE), _step(**CUSTOM), LOST, _step(0.25, 0.5, **LARGE, **HALF)]
NAMESAKES += [_step(0.05, 0.1, **CUSTOM, **HALF)]


@pytest.mark.parametrize(
    ("answer", "records", "expected"),
    [
        # The share is of the measured step, not of the sum of its phases.
        (SIZED, [_step()], {LONGEST: {"share": 0.4, "step_time_s": 0.5, "forward_time_s": 0.1}}),
        (SIZED, [_step(0.3)], {"forward_takes_longest": {"share": 0.3 / 0.7}, LONGEST: None}),
        (SIZED, [_step(), LOST], {LONGEST: {"says": "step of small takes"}, RATE: None}),
        (SIZED, [_step(0.1, 0.244)], {BACKWARD: {"ratio": 2.44, "says": "more (+22%)"}}),
        (SIZED, [_step(0.1, 0.219)], {BACKWARD: {"expected_ratio": 2, "says": "within 10% (+9%)"}}),
        (SIZED, [_step(0.1, 0.29, **FULL)], {BACKWARD: {"expected_ratio": 2.994}}),
        (SIZED, [_step(**ONE)], {"spread_unknown": {}, SPREAD: None}),
        # The phase with the largest spread, over all models.
        (SIZED, UNSTEADY, {SPREAD: {"spread_share": 1.041, "says": UNSTEADY_TEXTS}}),
        (SIZED, [_step()], {SPREAD: {"spread_share": 0.00707, "says": "of small.", "remedy": ""}}),
        (SIZED, FASTER, {RATE: {"step_time_ratio": 2, "says": ["(+100%)", "larger batch"]}}),
        (SIZED, FASTER, {RATE: {"first_flops_per_s": 1e9, "last_flops_per_s": 2e9}}),
        # The largest group of comparable steps is used.
        (SIZED, [*FASTER, _step(batch=8)], {RATE: {"parameter_ratio": 8.79}}),
        (SIZED, SLOWER, {RATE: {"says": ["95 k parameters) to custom (835 k", "(-50%)."]}}),
        (SIZED, [_step(), _step(**HALF), _step(**HALF, num_layers=3)], {RATE: None}),
        (SIZED, [_step()], {OPTIMIZER: {"optimizer_bytes_per_s": 280 * 95_040, "says": "unknown"}}),
        (SIZED, [_step(**H100)], {OPTIMIZER: {"memory_bytes_per_s": 3.35e12}}),
        (SIZED, [_step(optimizer=1e-7, **H100)], {BEYOND: {"says": "Synch"}, OPTIMIZER: None}),
        (SIZED, [SGD], {OPTIMIZER: None}),
        (HALVED, PAIR, {DTYPES: {"optimizer_share": 0.2, "float32_optimizer_share": 0.125}}),
        (HALVED, PAIR, {DTYPES: {"ratio": 0.5, "says": [": less)", "peaks is unknown"]}}),
        (HALVED, _pair(A100), {DTYPES: {"peak_ratio": 16, "says": ": no clear difference)"}}),
        (HALVED, _pair(A100 | TF32), {DTYPES: {"peak_ratio": 2}}),
        (HALVED, NAMESAKES, {DTYPES: {"ratio": 0.25, "says": "835 k"}}),
        (COMPILED, GAINED, {WHOLE_STEP: {"ratio": 5 / 6, "forward_ratio": 0.5, "says": ": less)"}}),
        (COMPILED, GAINED, {WHOLE_STEP: {"step_time_s": 0.5, "plain_step_time_s": 0.6}}),
        (COMPILED, [_step(**ONE), _step(**ONE, **WHOLE)], {WHOLE_STEP: {"says": FEW}}),
        # There is no answer without times or without a baseline of the same model.
        (SIZED, [_step(0.0)], {}),
        (SIZED, [msgspec.structs.replace(_step(), metrics={"step_time_s": Metric(value=1.0)})], {}),
        (SIZED, [LOST], {}),
        (HALVED, [_step(**CUSTOM), _step(**LARGE, **HALF)], {}),
        (COMPILED, [_step(**CUSTOM), _step(**LARGE, **WHOLE)], {}),
    ],
)
def test_findings(answer: Any, records: list[Record], expected: Any) -> None:
    check(answer, records, expected)


@pytest.mark.parametrize(
    ("cold", "first_step"),
    [
        ((3.0, *STEADY), {"first_step_time_s": 1.5, "says": SLOWER_FIRST}),
        ((1.2, 1.3, *STEADY), {"later_low_s": 0.495, "later_high_s": 0.65, "says": "within"}),
        ((0.5, *STEADY), {"num_later": 6, "says": "faster than all later ones."}),
        ((3.0, 1.0, 1.0), {"num_warmup": 0, "num_later": 2, "says": ": too few steps to judge."}),
        ((3.0,), None),
    ],
)
def test_warmup(cold: Sequence[float], first_step: Any) -> None:
    silent = _step(factors=(9.0, 9.0))
    del silent.case["warmup"]
    records = [silent, _step(warmup=5), _step(factors=cold, warmup=0)]
    warm = {"num_warmup": 5, "mean_s": 0.5, "std_s": 0.003536, "median_s": 0.5}
    expected = {"first_step": first_step, "step_time_after_warmup": warm}
    blocks = check(step.answer_warmup, records, expected)
    texts = [each.message for each in blocks[0].findings if "median" in each.message]
    assert ["± unknown" in text for text in texts] == [len(cold) == 1, False]
    check(step.answer_warmup, records[:2], {})
