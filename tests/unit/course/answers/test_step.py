"""Steps in, findings out: phases and sizes, warm-up, precision, compilation."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from paceline.course.answers import block, step
from paceline.records import Metric, Record
from paceline.reports.evidence.groups import Evidence
from tests.unit.course.report_cases import check, no_drawing
from tests.unit.record_factory import step_record

Expected = Mapping[str, Any]
STEADY = (0.99, 1.0, 1.01, 1.0, 0.995, 1.005)
SIZES = ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "head_dim")
MODEL: dict[str, Any] = {
    **dict(zip(SIZES, (100, 64, 128, 2, 2, 2, 32), strict=True)),
    "tied_embeddings": False,
    "compile": "none",
    "activation_checkpointing": "none",
    "float32_matmul_precision": "highest",
    "optimizer": "adamw",
    "hardware": "laptop",
}
PARAMETERS = 95_040
CUSTOM, LARGE = {"model": "custom"}, {"num_layers": 20, "model": "custom"}
H100, A100 = {"hardware": "h100-sxm"}, {"hardware": "a100-sxm-80gb"}
TF32, HALF = {"float32_matmul_precision": "high"}, {"precision": "bfloat16"}
LOST = step_record(outcome="out_of_memory", **{**MODEL, **LARGE})


@pytest.fixture(autouse=True)
def _quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "draw_picture", no_drawing)


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
    """A step whose samples are its times multiplied by factors, 0.1 s of it outside of phases."""
    times = {"forward": forward, "backward": backward, "optimizer": optimizer}
    times["step"] = sum(times.values()) + 0.1
    record = step_record(**{**MODEL, **case})
    metrics = {**record.metrics, "model_flops_per_s": Metric(value=flops_per_s)}
    for name, seconds in times.items():
        spread = (name == "optimizer" and optimizer_factors) or factors
        metrics[f"{name}_time_s"] = Metric.from_samples([seconds * factor for factor in spread])
    return msgspec.structs.replace(record, metrics=metrics)


def _without(record: Record, field: str) -> Record:
    case = {name: value for name, value in record.case.items() if name != field}
    return msgspec.structs.replace(record, case=case)


LONGEST = "backward_takes_longest"
BACKWARD = "backward_to_forward"
OPTIMIZER = "optimizer_bandwidth"
RATE = {"parameter_ratio": 8.79, "first_flops_per_s": 1e9}


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        # Of the step that was measured, not of the sum of its phases.
        ([_step()], {LONGEST: {"share": 0.4, "step_time_s": 0.5, "forward_time_s": 0.1}}),
        ([_step(0.3)], {"forward_takes_longest": {"share": 0.3 / 0.7}, LONGEST: None}),
        ([_step(0.1, 0.244)], {BACKWARD: {"ratio": 2.44, "says": "more (+22%)"}}),
        ([_step(0.1, 0.219)], {BACKWARD: {"expected_ratio": 2, "says": "alike (+9%)"}}),
        ([_step(0.1, 0.181)], {BACKWARD: {"says": "alike (-10%)"}}),
        ([_step(0.1, 0.17)], {BACKWARD: {"says": "less (-15%)"}}),
        (
            [_step(0.1, 0.29, activation_checkpointing="full", num_layers=20)],
            {BACKWARD: {"expected_ratio": 2.994, "says": "alike"}},
        ),
        ([_step(factors=(1.0,))], {"spread_unknown": {}, "largest_spread": None}),
        # The least steady phase of all models.
        (
            [_step(optimizer_factors=(0.5, 1.0, 2.5)), _step(**LARGE)],
            {"largest_spread": {"spread_share": 1.041, "says": ["optimizer of small", "more st"]}},
        ),
        ([_step()], {"largest_spread": {"spread_share": 0.00707, "says": "step of small."}}),
        (
            [_step(0.3, 0.4, 0.2, **LARGE, flops_per_s=2e9), _step(**CUSTOM)],
            {"rate_by_size": {**RATE, "step_time_ratio": 2, "says": ["(+100%)", "larger batch"]}},
        ),
        (
            [_step(**CUSTOM), _step(**LARGE, flops_per_s=5e8)],
            {"rate_by_size": {**RATE, "says": ["95 k parameters) to custom (835 k", "(-50%)."]}},
        ),
        ([_step(), _step(**HALF), _step(**HALF, num_layers=3)], {"rate_by_size": None}),
        ([_step(), LOST], {LONGEST: {"says": "Of small's"}, "rate_by_size": None}),
        ([_step()], {OPTIMIZER: {"optimizer_bytes_per_s": 280 * PARAMETERS, "says": "unknown"}}),
        ([_step(**H100)], {OPTIMIZER: {"memory_bytes_per_s": 3.35e12}}),
        (
            [_step(optimizer=1e-7, **H100)],
            {"optimizer_exceeds_memory_bandwidth": {"says": "Synchronise"}, OPTIMIZER: None},
        ),
        (
            [msgspec.structs.replace(_step(), case={**_step().case, "optimizer": "sgd"})],
            {OPTIMIZER: None},
        ),
    ],
)
def test_sizes(records: list[Record], expected: Expected) -> None:
    check(step.answer_sizes(Evidence.of(records)), expected)


def test_steps_without_times_answer_nothing() -> None:
    partly = msgspec.structs.replace(_step(), metrics={"step_time_s": Metric(value=1.0)})
    for record in (_step(0.0), partly, LOST):
        assert step.answer_sizes(Evidence.of([record])) == ()


@pytest.mark.parametrize(
    ("cold", "first_step"),
    [
        ((3.0, *STEADY), {"first_step_time_s": 1.5, "says": [": more.", "Leave it out"]}),
        ((1.2, 1.3, *STEADY), {"later_low_s": 0.495, "later_high_s": 0.65, "says": ": alike."}),
        ((0.5, *STEADY), {"num_later": 6, "says": ": less."}),
        ((3.0, 1.0, 1.0), {"num_warmup": 0, "num_later": 2, "says": ": unknown."}),
        ((3.0,), None),
    ],
)
def test_warmup(cold: Sequence[float], first_step: Expected | None) -> None:
    silent = _without(_step(factors=(9.0, 9.0)), "warmup")
    records = [silent, _step(warmup=5), _step(factors=cold, warmup=0)]
    blocks = step.answer_warmup(Evidence.of(records))
    warm = {"num_warmup": 5, "mean_s": 0.5, "std_s": 0.003536, "median_s": 0.5}
    check(blocks, {"first_step": first_step, "step_time_after_warmup": warm})
    texts = [each.message for each in blocks[0].findings if "median" in each.message]
    assert ["± unknown" in text for text in texts] == [len(cold) == 1, False]
    assert step.answer_warmup(Evidence.of(records[:2])) == ()


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (
            [_step(0.2, 0.4), _step(0.1, 0.2, **HALF)],
            {"ratio": 0.5, "optimizer_share": 0.2, "float32_optimizer_share": 0.125},
        ),
        ([_step(0.2, 0.4), _step(0.1, 0.2, **HALF)], {"says": [": less)", "peaks is unknown"]}),
        ([_step(**A100), _step(**A100, **HALF)], {"peak_ratio": 16, "says": ": alike)"}),
        ([_step(**A100, **TF32), _step(**A100, **TF32, **HALF)], {"peak_ratio": 2}),
        (
            [_step(), _step(0.2, 0.4, **HALF, factors=(1.0,))],
            {"ratio": 2, "says": "(unknown: too few samples, 1)"},
        ),
        # Shapes of one name are not divided by each other.
        (
            [
                *(_step(1.0, 2.0, **LARGE), _step(**CUSTOM), LOST),
                *(_step(0.25, 0.5, **LARGE, **HALF), _step(0.05, 0.1, **CUSTOM, **HALF)),
            ],
            {"ratio": 0.25, "says": "835 k"},
        ),
    ],
)
def test_precision(records: list[Record], expected: Expected) -> None:
    check(step.answer_precision(Evidence.of(records)), {"bfloat16_to_float32": expected})


@pytest.mark.parametrize(
    ("plain", "compiled", "factors", "expected"),
    [
        (0.2, 0.1, STEADY, {"forward_ratio": 0.5, "ratio": 0.8333, "says": ": less)"}),
        (0.1, 0.2, STEADY, {"step_time_s": 0.6, "plain_step_time_s": 0.5, "says": ": more)"}),
        (0.12, 0.1, (0.8, 0.9, 1.0, 1.1, 1.2, 1.0), {"says": ": alike)"}),
        (0.2, 0.1, (1.0,), {"says": "(unknown: too few samples, 1)"}),
    ],
)
def test_compiled_step(
    plain: float, compiled: float, factors: Sequence[float], expected: Expected
) -> None:
    records = [_step(plain, factors=factors), _step(compiled, factors=factors, compile="whole")]
    blocks = step.answer_compiled_step(Evidence.of(records))
    check(blocks, {"compiled_to_plain_step": expected})
    assert blocks[0].pictures


def test_without_a_baseline_of_the_same_model_nothing_is_answered() -> None:
    half, compiled = _step(**LARGE, **HALF), _step(**LARGE, compile="whole")
    assert step.answer_precision(Evidence.of([_step(**CUSTOM), half])) == ()
    assert step.answer_compiled_step(Evidence.of([_step(**CUSTOM), compiled])) == ()
