"""Attention in, findings out: growth, compilation, implementations, kernels."""

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.course.answers import attention as answers
from paceline.course.answers import block
from paceline.records import Metric, Record, find_kind
from paceline.reports.evidence.groups import Evidence
from tests.unit.course.report_cases import check, no_drawing
from tests.unit.reports.factory import ENVIRONMENT

STEADY = (1.0, 0.999, 1.001, 1.0, 1.0, 1.0, 1.0)
SDPA, HALF = {"implementation": "sdpa"}, {"dtype": "bfloat16"}
FASTEST, RATE = "fastest_attention", "attention_rate"
FEW = "(unknown: too few samples, 1)"


def _attention(
    seconds: float = 1.0,
    *,
    spread: Sequence[float] = STEADY,
    saved: float = 1e6,
    peak: float = 3e6,
    rate: float | None = None,
    with_both: bool = True,
    outcome: Any = "ok",
    **case: Any,
) -> Record:
    usual: dict[str, Any] = dict.fromkeys(find_kind("attention").join_key, "x")
    usual |= {"implementation": "naive", "batch": 1, "context": 1024, "head_dim": 64}
    usual |= {"dtype": "float32", "float32_matmul_precision": "highest", "compile": "none"}
    usual |= {"causal": True, "device": "cpu", "hardware": "a processor"}
    shares = {"forward": 0.25, "backward": 0.75, **({"both": 1.0} if with_both else {})}
    metrics = {
        f"{name}_time_s": Metric.from_samples([seconds * share * factor for factor in spread])
        for name, share in shares.items()
    }
    metrics |= {"saved_for_backward_bytes": Metric(value=saved), "peak_bytes": Metric(value=peak)}
    if rate is not None:
        metrics["flops_per_s"] = Metric(value=rate)
    return Record(
        kind="attention",
        case=usual | case,
        environment=ENVIRONMENT,
        metrics=metrics if outcome == "ok" else {},
        outcome=outcome,
        reason=None if outcome == "ok" else "too large",
    )


def _lost(**case: Any) -> Record:
    return _attention(outcome="out_of_memory", **case)


def _rated(rate: float | None, hardware: str, **case: Any) -> list[Record]:
    return [
        _attention(hardware=hardware, **case),
        _attention(0.5, rate=rate, hardware=hardware, **SDPA, **case),
    ]


ROUNDED = {"float32_matmul_precision": "high"}


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (
            [_attention(context=1024), _attention(context=4096, **SDPA)],
            {"nothing_to_compare": {}, FASTEST: None, "all_cases_ran": {"num_cases": 2}},
        ),
        (
            [_attention(peak=1e7), _attention(0.5, peak=1e6, **SDPA), _attention(context=4096)],
            {
                FASTEST: {
                    "time_s": 0.5,
                    "naive_time_s": 1.0,
                    "peak_bytes": 1e6,
                    "naive_peak_bytes": 1e7,
                    "says": ["length 1024", "sdpa is the fastest", "naive takes 2 times", "more)"],
                }
            },
        ),
        (
            [_attention(with_both=False), _attention(0.98, with_both=False, **SDPA)],
            {FASTEST: {"time_s": 0.98, "naive_time_s": 1.0, "says": ": alike)"}},
        ),
        ([_attention(spread=(1.0,)), _attention(0.5, **SDPA)], {FASTEST: {"says": FEW}}),
        # The longest at which most of them ran.
        (
            [
                *(_attention(context=n) for n in (256, 512)),
                *(_attention(context=n, **SDPA) for n in (256, 512, 900)),
            ],
            {FASTEST: {"says": "length 512"}},
        ),
        *(
            (
                [
                    _attention(),
                    _attention(0.5, **SDPA),
                    _attention(half, spread=spread, **SDPA, **HALF),
                ],
                {"bfloat16_to_float32": expected},
            )
            for half, spread, expected in (
                (0.2, STEADY, {"ratio": 0.4, "says": ["bfloat16 sdpa", ": less)"]}),
                (1.0, STEADY, {"ratio": 2, "says": ": more)"}),
                (0.49, STEADY, {"says": [": alike)", "reaches the kernel"]}),
                (0.2, (1.0,), {"ratio": 0.4, "says": FEW}),
            )
        ),
        ([_attention(), _attention(0.5, **SDPA)], {"bfloat16_to_float32": None}),
        (_rated(1e12, "a processor"), {RATE: {"flops_per_s": 1e12, "says": "peak is unknown"}}),
        (_rated(None, "a processor"), {RATE: None}),
        (_rated(33.5e12, "h100-sxm"), {RATE: {"peak_flops_per_s": 67e12}}),
        (_rated(247e12, "h100-sxm", **ROUNDED), {RATE: {"peak_flops_per_s": 494.5e12}}),
        (
            _rated(247e12, "h100-sxm"),
            {"attention_rate_exceeds_peak": {"says": "timer"}, RATE: None},
        ),
        (_rated(1e12, "v100-sxm2-16gb", **ROUNDED), {RATE: {"says": "peak is unknown"}}),
        (
            [
                _attention(context=256),
                _lost(context=4096),
                _lost(context=1024),
                _attention(context=256, **SDPA),
            ],
            {
                "cases_missing": {
                    "num_missing": 2,
                    "num_cases": 3,
                    "says": ["naive did not run", "length 1024", "out of memory, too large"],
                },
                "all_cases_ran": None,
            },
        ),
    ],
)
def test_implementations(
    monkeypatch: pytest.MonkeyPatch, records: list[Record], expected: dict[str, Any]
) -> None:
    monkeypatch.setattr(block, "draw_picture", no_drawing)
    check(answers.answer_flash(Evidence.of(records)), expected)


@pytest.mark.parametrize(
    ("compiled", "spread", "expected"),
    [
        (
            0.5,
            STEADY,
            {"ratio": 0.5, "saved_bytes": 2e5, "plain_saved_bytes": 1e6, "says": "less)"},
        ),
        (1.5, STEADY, {"ratio": 1.5, "least_ratio": 0.9, "most_ratio": 1.5, "says": ": more)"}),
        (1.02, STEADY, {"says": ["length 2048", ": alike)"]}),
        (0.5, (1.0,), {"least_ratio": 0.5, "most_ratio": 0.9, "says": FEW}),
    ],
)
def test_compiling(compiled: float, spread: Sequence[float], expected: dict[str, Any]) -> None:
    longest = [
        _attention(spread=spread, context=2048),
        _attention(compiled, spread=spread, context=2048, compile="whole", saved=2e5),
    ]
    shorter = [_attention(context=512), _attention(0.9, context=512, compile="whole")]
    blocks = answers.answer_compiled_attention(Evidence.of([*longest, *shorter, _lost(context=9)]))
    check(blocks, {"compiled_to_plain_attention": expected})
    assert [picture.name for picture in blocks[0].pictures] == ["compiled-0-attention-time"]
    assert b"</svg>" in blocks[0].pictures[0].svg
    unpaired = [longest[0], shorter[1]]
    assert answers.answer_compiled_attention(Evidence.of(unpaired)) == ()


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (
            (1e6, 4e6),
            {
                "attention_memory_quadratic": {
                    "saved_power": 2,
                    "forward_power": 3,
                    "forward_time_s": 2.0,
                    "says": ["From length 1,024 to length 2048", "Recompute"],
                }
            },
        ),
        ((1e6, 2e6), {"attention_memory_linear": {"saved_power": 1, "saved_bytes": 2e6}}),
        ((0.0, 2e6), {"attention_memory_linear": None, "all_cases_ran": {"num_cases": 3}}),
        # Three tensors of 2048 by 64 numbers and the scores.
        (
            (1e6, 18_350_080),
            {"attention_saved_bytes": {"expected_saved_bytes": 18_350_080, "says": "alike (+0%)"}},
        ),
    ],
)
def test_growth(
    monkeypatch: pytest.MonkeyPatch, saved: tuple[float, float], expected: dict[str, Any]
) -> None:
    monkeypatch.setattr(block, "draw_picture", no_drawing)
    records = [
        _attention(8.0, context=2048, saved=saved[1], causal=False),
        _attention(1.0, context=1024, saved=saved[0], causal=False),
        _attention(context=4096, head_dim=128, causal=False),
    ]
    check(answers.answer_naive(Evidence.of(records)), expected)


def _kernel(*, matrix: float = 8, spill: float = 0, registers: float = 99, **case: Any) -> Record:
    usual: dict[str, Any] = dict.fromkeys(find_kind("kernel").join_key, "x")
    names = ("shared_bytes", "occupancy", "worst_intensity", "best_intensity")
    metrics = dict.fromkeys(names, 1.0)
    metrics |= {"matrix_instructions": matrix, "spill_bytes": spill, "registers": registers}
    metrics["worst_ceiling"] = registers / 200
    return Record(
        kind="kernel",
        case=usual | {"kernel": "forward", "architecture": "sm90", **case},
        environment=ENVIRONMENT,
        metrics={name: Metric(value=value) for name, value in metrics.items()},
        outcome="ok",
    )


@pytest.mark.parametrize(
    ("kernels", "caption", "expected"),
    [
        (
            [_kernel(), _kernel(mask="y", spill=4, registers=120)],
            "mask x and y",
            {
                "register_spills": {"num_spilling": 1, "num_kernels": 2, "num_registers": 120},
                "lowest_ceiling": {"peak_share": 0.495, "says": "forward for sm90"},
            },
        ),
        ([_kernel(matrix=0)], "architecture sm90", {"no_matrix_units": {}, "lowest_ceiling": None}),
    ],
)
def test_kernels(kernels: list[Record], caption: str, expected: dict[str, Any]) -> None:
    (found,) = answers.answer_kernels(Evidence.of(kernels))
    check((found,), expected)
    assert caption in found.tables[0].caption
    assert not found.tables[0].caption.startswith(",")
