"""Tests of the numbers of attention: growth, compilation, implementations, kernels."""

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.course import attention, calculated
from paceline.records import Record
from paceline.reports.record_sets import RecordSet
from tests.unit.course.report_cases import FEW, ONE, STEADY, check, make_record, question_of
from tests.unit.record_factory import kernel_record

USUAL: dict[str, Any] = {"implementation": "naive", "batch": 1, "context": 1024, "head_dim": 64}
USUAL |= {"dtype": "float32", "float32_matmul_precision": "highest", "compile": "none"}
USUAL |= {"causal": True}
SDPA, WHOLE = {"implementation": "sdpa"}, {"compile": "whole"}
H100, V100 = {"hardware": "h100-sxm"}, {"hardware": "v100-sxm2-16gb"}
ROUNDED = {"float32_matmul_precision": "high"}


def _attention(
    seconds: float = 1.0,
    *,
    spread: Sequence[float] = STEADY,
    saved: float = 1e6,
    rate: float | None = None,
    **case: Any,
) -> Record:
    metrics: dict[str, Any] = {
        f"{name}_time_s": [seconds * share * factor for factor in spread]
        for name, share in (("forward", 0.25), ("backward", 0.75), ("both", 1.0))
    }
    metrics |= {"saved_for_backward_bytes": saved, "peak_bytes": 3e6, "flops_per_s": rate}
    return make_record("attention", metrics, **{**USUAL, **case})


def _lost(**case: Any) -> Record:
    return make_record("attention", {}, outcome="skipped", **{**USUAL, **case})


def _rated(rate: float | None, **case: Any) -> list[Record]:
    return [_attention(**case), _attention(0.5, rate=rate, **SDPA, **case)]


def _compiled(seconds: float, spread: Sequence[float] = STEADY) -> list[Record]:
    """Returns two lengths, compiled 0.9 times as long and `seconds`, and one that was skipped."""
    longest = [_attention(seconds, spread=spread, context=2048, saved=2e5, **WHOLE)]
    longest += [_attention(spread=spread, context=2048), _lost(context=9)]
    return [*longest, _attention(context=512), _attention(0.9, context=512, **WHOLE)]


def _grown(first: float, last: float) -> list[Record]:
    """Returns records with an eightfold time and given saved bytes from 1024 to 2048 tokens."""
    plain = {"causal": False}
    wide = {"head_dim": 128, **plain}
    records = [_attention(8.0, context=2048, saved=last, **plain), _attention(saved=first, **plain)]
    records += [_attention(0.1, context=256, **plain), _attention(context=4096, **wide)]
    return [*records, _lost(context=8192, **wide)]


SHORT, LONG = {"context": 256}, {"context": 4096}
APART = [_attention(), _attention(**LONG, **SDPA)]
SEVERAL = [_attention(**SHORT), _attention(), _attention(**LONG), _attention(**SHORT, **SDPA)]
SEVERAL += [_attention(0.5, **SDPA)]
LOST = [_attention(**SHORT), _lost(**LONG), _lost(), _attention(**SDPA)]
FASTEST, COMPILED, GROWTH = "fastest_attention", "compiled_attention", "attention_growth"
# Three tensors of 2048 by 64 numbers and the scores.
SAVED = 4 * (3 * 2048 * 64 + 2048**2)
TILED = {"saved_bytes": 8.023 * 2**30, "tiled_saved_bytes": 32.5 * 2**20, "saved_ratio": 253}
FLASH, NAIVE = attention.fastest_attention, attention.attention_growth
COMPILE, CALCULATED = attention.compiled_attention, calculated.score_memory


@pytest.mark.parametrize(
    ("finds", "records", "name", "expected"),
    [
        (FLASH, APART, FASTEST, {"num_implementations": 1}),
        # The longest length at which most implementations ran.
        (FLASH, SEVERAL, FASTEST, {"time_s": 0.5, "context": 1024}),
        (FLASH, SEVERAL, FASTEST, {"says": ["sdpa, takes 500 ms", "naive takes 2 times"]}),
        (FLASH, SEVERAL, FASTEST, {"slowest_ratio": 2, "num_implementations": 2}),
        # Another answer covers compiled attention.
        (FLASH, [_attention(**WHOLE), _attention(**WHOLE, **SDPA)], FASTEST, None),
        (FLASH, _rated(1e12), FASTEST, {"flops_per_s": 1e12, "device_flops_per_s": None}),
        (FLASH, _rated(None), FASTEST, {"flops_per_s": None}),
        (FLASH, _rated(33.5e12, **H100), FASTEST, {"device_flops_per_s": 67e12}),
        (FLASH, _rated(247e12, **H100, **ROUNDED), FASTEST, {"device_flops_per_s": 494.5e12}),
        (FLASH, _rated(1e12, **V100, **ROUNDED), FASTEST, {"device_flops_per_s": None}),
        (FLASH, LOST, FASTEST, {"context": 1024, "num_implementations": 1}),
        (COMPILE, _compiled(0.5), COMPILED, {"ratio": 0.5, "context": 2048}),
        (COMPILE, [_attention(**LONG), _attention(**SHORT, **WHOLE)], COMPILED, None),
        (COMPILE, _compiled(1.5), COMPILED, {"ratio": 1.5}),
        (COMPILE, _compiled(0.5, ONE), COMPILED, {"ratio": 0.5, "says": FEW}),
        (NAIVE, _grown(1e6, 4e6), GROWTH, {"saved_power": 2, "forward_power": 3}),
        (NAIVE, _grown(1e6, 4e6), GROWTH, {"forward_time_s": 2.0, "first_context": 1024}),
        (NAIVE, _grown(1e6, 2e6), GROWTH, {"saved_power": 1, "saved_for_backward_bytes": 2e6}),
        (NAIVE, _grown(0.0, 2e6), GROWTH, {"saved_power": None, "forward_power": 3}),
        (NAIVE, _grown(1e6, SAVED), GROWTH, {"expected_saved_bytes": SAVED}),
        (CALCULATED, [], "score_memory", TILED),
    ],
)
@pytest.mark.usefixtures("no_pictures")
def test_numbers(finds: Any, records: list[Record], name: str, expected: Any) -> None:
    check(finds, records, {name: expected} if expected else {})


def test_compiled_attention_is_drawn_beside_plain_attention_of_the_same_length() -> None:
    blocks = question_of(COMPILE).answer(RecordSet.of(_compiled(0.5)))
    ((picture,),) = (block.pictures for block in blocks)
    assert picture.name == "torch_compile-attention-0-attention-time"


MIXED = [kernel_record(), kernel_record(20, spill_bytes=4, mask="z", matrix_instructions=0)]
MIXED += [kernel_record(120, mask="y")]
SPILLS = {"num_spilling": 1, "num_kernels": 2, "registers": 120}
CEILING = {"ceiling_share": 0.495, "num_multiplying": 2, "says": "forward for sm90 has the lowest"}


@pytest.mark.parametrize(
    ("kernels", "caption", "expected"),
    [
        (MIXED[1:], "mask z and y", SPILLS),
        (MIXED, "mask x and z", CEILING),
        (MIXED[1:2], "architecture sm90", {"num_multiplying": 0, "ceiling_share": None}),
    ],
)
def test_kernels(kernels: list[Record], caption: str, expected: Any) -> None:
    (found,) = check(attention.kernel_resources, kernels, {"kernel_resources": expected})
    assert caption in found.tables[0].caption
    assert not found.tables[0].caption.startswith(",")
