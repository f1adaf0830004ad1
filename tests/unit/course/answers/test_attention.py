"""Attention in, findings out: growth, compilation, implementations, kernels."""

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.course.answers import attention as answers
from paceline.course.answers import block
from paceline.records import Record
from paceline.reports.evidence.groups import Evidence
from tests.unit.course.report_cases import check, make_record, no_drawing

STEADY = (1.0, 0.999, 1.001, 1.0, 1.0, 1.0, 1.0)
USUAL: dict[str, Any] = {"implementation": "naive", "batch": 1, "context": 1024, "head_dim": 64}
USUAL |= {"dtype": "float32", "float32_matmul_precision": "highest", "compile": "none"}
SDPA, ROUNDED = {"implementation": "sdpa"}, {"float32_matmul_precision": "high"}
FASTEST, RATE = "fastest_attention", "attention_rate"
FEW = "(unknown: too few samples, 1)"


def _attention(
    seconds: float = 1.0,
    *,
    spread: Sequence[float] = STEADY,
    saved: float = 1e6,
    peak: float = 3e6,
    rate: float = 0.0,
    **case: Any,
) -> Record:
    metrics: dict[str, Any] = {
        f"{name}_time_s": [seconds * share * factor for factor in spread]
        for name, share in (("forward", 0.25), ("backward", 0.75), ("both", 1.0))
    }
    metrics |= {"saved_for_backward_bytes": saved, "peak_bytes": peak}
    metrics |= {"flops_per_s": rate} if rate else {}
    return make_record("attention", metrics, **{**USUAL, "causal": True, **case})


def _at(context: int, **case: Any) -> Record:
    return _attention(context=context, **case)


def _lost(**case: Any) -> Record:
    return make_record("attention", {}, outcome="skipped", **{**USUAL, "causal": True, **case})


def _rated(rate: float, **case: Any) -> list[Record]:
    return [_attention(**case), _attention(0.5, rate=rate, **SDPA, **case)]


@pytest.mark.parametrize(
    ("records", "name", "expected"),
    [
        ([_attention(), _attention(context=4096, **SDPA)], "nothing_to_compare", {}),
        ([_attention(), _attention(context=4096, **SDPA)], "all_cases_ran", {"num_cases": 2}),
        ([_attention(), _attention(context=4096, **SDPA)], FASTEST, None),
        # The longest at which most of them ran.
        (
            [*map(_at, (256, 1024, 4096)), _at(256, **SDPA), _attention(0.5, peak=1e6, **SDPA)],
            FASTEST,
            {"time_s": 0.5, "naive_time_s": 1, "peak_bytes": 1e6, "naive_peak_bytes": 3e6}
            | {"says": ["length 1024", "sdpa is", "naive takes 2 times", "more)", "2.86 MiB."]},
        ),
        ([_attention(), _attention(0.98, **SDPA)], FASTEST, {"says": ": alike)"}),
        ([_attention(spread=(1.0,)), _attention(0.5, **SDPA)], FASTEST, {"says": FEW}),
        (_rated(1e12), RATE, {"flops_per_s": 1e12, "says": "peak is unknown"}),
        (_rated(0), RATE, None),
        (_rated(33.5e12, hardware="h100-sxm"), RATE, {"peak_flops_per_s": 67e12}),
        (_rated(247e12, hardware="h100-sxm", **ROUNDED), RATE, {"peak_flops_per_s": 494.5e12}),
        (_rated(247e12, hardware="h100-sxm"), f"{RATE}_exceeds_peak", {"says": "timer"}),
        (_rated(1e12, hardware="v100-sxm2-16gb", **ROUNDED), RATE, {"says": "peak is unknown"}),
        (
            [_attention(context=256), _lost(context=4096), _lost(), _attention(**SDPA)],
            "cases_missing",
            {"num_missing": 2, "num_cases": 3, "says": ["naive did", "1024", "skipped, a reason"]},
        ),
        ([_lost(), _attention(**SDPA), _attention(context=256)], "all_cases_ran", None),
        # Of compiled attention there are other questions.
        ([_attention(compile="whole"), _attention(compile="whole", **SDPA)], FASTEST, None),
    ],
)
def test_implementations(
    monkeypatch: pytest.MonkeyPatch, records: list[Record], name: str, expected: Any
) -> None:
    monkeypatch.setattr(block, "draw_picture", no_drawing)
    check(answers.answer_flash(Evidence.of(records)), {name: expected})


@pytest.mark.parametrize(
    ("half", "spread", "expected"),
    [
        (0.2, STEADY, {"ratio": 0.4, "says": ["length 4096", "bfloat16, sdpa", ": less)"]}),
        (1.0, STEADY, {"ratio": 2, "says": ": more)"}),
        (0.49, STEADY, {"says": [": alike)", "reaches the kernel"]}),
        (0.2, (1.0,), {"ratio": 0.4, "says": FEW}),
    ],
)
def test_precision(
    monkeypatch: pytest.MonkeyPatch, half: float, spread: Sequence[float], expected: Any
) -> None:
    monkeypatch.setattr(block, "draw_picture", no_drawing)
    records = [_attention(0.5, context=context, **SDPA) for context in (4096, 1024)]
    records += [_attention(half, spread=spread, context=4096, dtype="bfloat16", **SDPA)]
    records += [_attention(), _attention(dtype="bfloat16", **SDPA)]
    blocks = answers.answer_flash(Evidence.of(records))
    check(blocks, {"bfloat16_to_float32": expected})
    check(
        answers.answer_flash(Evidence.of(records[:2] + records[3:4])), {"bfloat16_to_float32": None}
    )


@pytest.mark.parametrize(
    ("compiled", "spread", "expected"),
    [
        (0.5, STEADY, {"ratio": 0.5, "saved_bytes": 2e5, "plain_saved_bytes": 1e6}),
        (0.5, STEADY, {"says": ["length 2048", ": less)"]}),
        (1.5, STEADY, {"ratio": 1.5, "least_ratio": 0.9, "most_ratio": 1.5, "says": ": more)"}),
        (1.02, STEADY, {"says": ": alike)"}),
        (0.5, (1.0,), {"least_ratio": 0.5, "most_ratio": 0.9, "says": FEW}),
    ],
)
def test_compiling(compiled: float, spread: Sequence[float], expected: Any) -> None:
    whole = {"compile": "whole"}
    longest = _attention(spread=spread, context=2048)
    shorter = [_attention(context=512), _attention(0.9, context=512, **whole)]
    records = [_attention(compiled, spread=spread, context=2048, saved=2e5, **whole), *shorter]
    blocks = answers.answer_compiled_attention(Evidence.of([longest, *records, _lost(context=9)]))
    check(blocks, {"compiled_to_plain_attention": expected})
    assert [picture.name for picture in blocks[0].pictures] == ["compiled-0-attention-time"]
    assert b"</svg>" in blocks[0].pictures[0].svg
    assert answers.answer_compiled_attention(Evidence.of([longest, shorter[1]])) == ()


POWERS = {"saved_power": 2, "forward_power": 3, "forward_time_s": 2.0}
# Three tensors of 2048 by 64 numbers and the scores.
SAVED = 4 * (3 * 2048 * 64 + 2048**2)


@pytest.mark.parametrize(
    ("saved", "name", "expected"),
    [
        ((1e6, 4e6), "attention_memory_quadratic", {**POWERS, "says": "Recompute"}),
        ((1e6, 4e6), "attention_memory_quadratic", {"says": "From length 1024 to length 2048"}),
        ((1e6, 2e6), "attention_memory_linear", {"saved_power": 1, "saved_bytes": 2e6}),
        ((0.0, 2e6), "attention_memory_linear", None),
        ((0.0, 2e6), "cases_missing", {"num_missing": 1, "says": "head dim 128"}),
        ((1e6, SAVED), "attention_saved_bytes", {"expected_saved_bytes": SAVED, "says": "(+0%)"}),
    ],
)
def test_growth(
    monkeypatch: pytest.MonkeyPatch, saved: tuple[float, float], name: str, expected: Any
) -> None:
    monkeypatch.setattr(block, "draw_picture", no_drawing)
    records = [
        _attention(8.0, context=2048, saved=saved[1], causal=False),
        _attention(1.0, context=1024, saved=saved[0], causal=False),
        _attention(0.1, context=256, causal=False),
        _attention(context=4096, head_dim=128, causal=False),
        _lost(context=8192, head_dim=128, causal=False),
    ]
    check(answers.answer_naive(Evidence.of(records)), {name: expected})


def test_the_calculated_configuration() -> None:
    expected = {"saved_bytes": 8.023 * 2**30, "tiled_saved_bytes": 32.5 * 2**20, "saved_ratio": 253}
    check(answers.calculate_naive(Evidence.of([])), {"attention_saved_bytes": expected})


def _kernel(matrix: float = 8, spill: float = 0, registers: float = 99, **case: Any) -> Record:
    names = ("shared_bytes", "occupancy", "worst_intensity", "best_intensity")
    metrics = {**dict.fromkeys(names, 1.0), "matrix_instructions": matrix, "spill_bytes": spill}
    metrics |= {"registers": registers, "worst_ceiling": registers / 200}
    return make_record("kernel", metrics, **{"kernel": "forward", "architecture": "sm90", **case})


MIXED = [_kernel(), _kernel(0, 4, 20, mask="z"), _kernel(mask="y", registers=120)]
SPILLS = {"num_spilling": 1, "num_kernels": 2, "num_registers": 120}


@pytest.mark.parametrize(
    ("kernels", "caption", "name", "expected"),
    [
        (MIXED[1:], "mask z and y", "register_spills", SPILLS),
        (
            MIXED,
            "mask x and z",
            "lowest_ceiling",
            {"peak_share": 0.495, "says": "forward for sm90"},
        ),
        ([_kernel(0)], "architecture sm90", "no_matrix_units", {}),
        ([_kernel(0)], "architecture sm90", "lowest_ceiling", None),
    ],
)
def test_kernels(kernels: list[Record], caption: str, name: str, expected: Any) -> None:
    (found,) = answers.answer_kernels(Evidence.of(kernels))
    check((found,), {name: expected})
    assert caption in found.tables[0].caption
    assert not found.tables[0].caption.startswith(",")
