"""Answers without measurement: sums in low precision, autocast, accounting of a large model."""

from typing import NamedTuple

import numpy as np

from paceline.core.presets import model_preset
from paceline.core.units import to_gibibytes
from paceline.course.accounting import account
from paceline.course.findings.template import make_finding
from paceline.reports.document.model import Block
from paceline.reports.evidence.groups import Evidence
from paceline.reports.tables.table import Table

_SUMS = (
    ("float32", "float32", ""),
    ("float16", "float16", ""),
    ("float32", "float16", ""),
    ("float32", "float16", ", cast to float32 first"),
)
_TERM, _NUM_TERMS, _EXACT = 0.01, 1000, 10.0
_AUTOCAST_DTYPES = (
    ("parameters inside the autocast region", "float32", "float32"),
    ("output of the first linear layer", "bf16 or fp16", "bf16 or fp16"),
    ("output of the layer norm", "float32", "bf16 or fp16"),
    ("logits", "bf16 or fp16", "bf16 or fp16"),
    ("loss (cross-entropy)", "float32", "float32"),
    ("gradients of the parameters", "float32", "float32"),
)
"""Of a linear layer, a layer norm and a linear layer under autocast: on CUDA, and on a CPU."""


class _Sum(NamedTuple):
    """One term added many times, rounded after every addition."""

    sum_dtype: str
    term_dtype: str
    result: float
    term: float
    """The term as its dtype represents it."""
    spacing: float
    """How far apart the numbers of the sum's dtype are at the result."""


def _repeated_sum(sum_dtype: str, term_dtype: str) -> _Sum:
    """A sum's two errors: of its terms, and of its own numbers, which may be further apart."""
    term = np.dtype(term_dtype).type(_TERM)
    total = np.dtype(sum_dtype).type(0)
    for _ in range(_NUM_TERMS):
        total = np.dtype(sum_dtype).type(total + term)
    return _Sum(sum_dtype, term_dtype, float(total), float(term), float(np.spacing(total)))


def calculate_sums(_evidence: Evidence) -> tuple[Block, ...]:
    """Adds 0.01 a thousand times in four ways."""
    sums = [_repeated_sum(total, term) for total, term, _ in _SUMS]
    worst = max(sums, key=lambda each: abs(each.result - _EXACT))
    represented = sums[2]
    table = Table(
        headers=("sum", "term", "result", "error"),
        rows=tuple(
            (total, f"{term}{how}", f"{found.result:.4f}", f"{found.result - _EXACT:+.4f}")
            for (total, term, how), found in zip(_SUMS, sums, strict=True)
        ),
        caption="rounded to the dtype of the sum after every addition",
    )
    findings = (
        make_finding(
            "sum_rounds",
            "The sum in {dtype} is furthest off, {result:.4f}: its numbers are {spacing:.4g} apart "
            "there, so every addition above 8 moves it by that instead of {term:.6f}.",
            dtype=worst.sum_dtype,
            result=worst.result,
            spacing=worst.spacing,
            term=worst.term,
        ),
        make_finding(
            "term_rounds",
            "{result:.4f} is another error: {dtype} has no 0.01, the nearest is {term:.9f}, and a "
            "thousand of those are as much however they are added.",
            "Keep sums in float32 even when their terms are not.",
            dtype=represented.term_dtype,
            result=represented.result,
            term=represented.term,
        ),
    )
    heading = "0.01 added a thousand times, calculated"
    return (Block(heading=heading, tables=(table,), findings=findings),)


def explain_autocast(_evidence: Evidence) -> tuple[Block, ...]:
    """Lists what autocast computes in which dtype."""
    table = Table(
        headers=("what", "on CUDA", "on a CPU"),
        rows=_AUTOCAST_DTYPES,
        caption="checked by tests/unit/models/test_mixed_precision.py",
    )
    findings = (
        make_finding(
            "loss_is_float32",
            "The loss is float32, not float16 or bfloat16: cross-entropy is on autocast's list of "
            "operations that run in float32.",
        ),
        make_finding(
            "layer_norm_is_float32",
            "Layer norm is kept in float32 because it sums squares: in float16 256 squared "
            "overflows; bfloat16 has float32's range, but eight significant bits are few for the "
            "sums of a mean and a variance.",
        ),
    )
    heading = "Linear layer, layer norm, linear layer; float32 weights under autocast"
    return (Block(heading=heading, tables=(table,), findings=findings),)


def calculate_accounting(_evidence: Evidence) -> tuple[Block, ...]:
    """Answers the four accounting questions."""
    answers = account(model_preset("xxl"))
    states, sharded, fixed, free = (answer.values for answer in answers)
    findings = (
        make_finding(
            "states",
            "(a) The states, {state_gib:,.0f} GiB, fill {devices_of_80_gib} H100 before any "
            "activation; each token adds {saved_bytes_per_token} bytes.",
            state_gib=to_gibibytes(states["state_bytes"]),
            **states,
        ),
        make_finding(
            "sharded_states",
            "(b) Without activations {devices_of_95_gib} devices are enough, with 4096 tokens each "
            "{devices_with_4096_tokens}; with {most_tokens_per_device:,.0f} no number is, because "
            "half of the activations is not sharded.",
            **sharded,
        ),
        make_finding(
            "compute_bound_batch",
            "(c) On 16 by 4 devices forward is bound by compute from {batch_tokens_add:,.0f} "
            "tokens on if the two axes add up, from {batch_tokens_overlap:,.0f} if they overlap.",
            **fixed,
        ),
        make_finding(
            "compute_bound_batch_of_any_mesh",
            "(d) Choosing the two axes again lowers that to {batch_tokens_add:,.0f} or "
            "{batch_tokens_overlap:,.0f} tokens.",
            "Pipeline stages and gathers in fewer bits lower it further; gradient accumulation and "
            "longer contexts do not, they only make the batch larger.",
            **free,
        ),
    )
    return (Block(heading="xxl, calculated", working=answers, findings=findings),)
