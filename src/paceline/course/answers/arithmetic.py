"""Answers without measurements: low-precision sums, autocast, accounting for a large model."""

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
"""Dtypes of a linear, layer norm, linear stack under autocast: tensor, on CUDA, on a CPU."""


class _Sum(NamedTuple):
    """A sum of many equal terms, rounded after every addition."""

    sum_dtype: str
    term_dtype: str
    result: float
    term: float
    """The term, rounded to its dtype."""
    spacing: float
    """Distance between neighbouring values of the sum's dtype at the result."""


def _repeated_sum(sum_dtype: str, term_dtype: str) -> _Sum:
    """Returns a repeated sum with its two sources of error: the term and the spacing of the sum."""
    term = np.dtype(term_dtype).type(_TERM)
    total = np.dtype(sum_dtype).type(0)
    for _ in range(_NUM_TERMS):
        total = np.dtype(sum_dtype).type(total + term)
    return _Sum(sum_dtype, term_dtype, float(total), float(term), float(np.spacing(total)))


def calculate_sums(_evidence: Evidence) -> tuple[Block, ...]:
    """Returns the results of adding 0.01 a thousand times with four pairs of dtypes."""
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
            "The {dtype} sum is furthest from 10, at {result:.4f}: there, neighbouring {dtype} "
            "numbers are {spacing:.4g} apart, so above 8 every addition changes the sum by "
            "{spacing:.4g} instead of {term:.6f}.",
            dtype=worst.sum_dtype,
            result=worst.result,
            spacing=worst.spacing,
            term=worst.term,
        ),
        make_finding(
            "term_rounds",
            "The float32 sum of {dtype} terms, {result:.4f}, has a different error: {dtype} cannot "
            "represent 0.01. Its nearest number is {term:.9f}, and adding that number a thousand "
            "times gives {result:.4f} even in float32.",
            "Accumulate in float32 even when the terms have lower precision.",
            dtype=represented.term_dtype,
            result=represented.result,
            term=represented.term,
        ),
    )
    heading = "0.01 added a thousand times, calculated"
    return (Block(heading=heading, tables=(table,), findings=findings),)


def explain_autocast(_evidence: Evidence) -> tuple[Block, ...]:
    """Returns a table of the dtype of each tensor under autocast."""
    table = Table(
        headers=("tensor", "on CUDA", "on a CPU"),
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
            "On CUDA, autocast keeps layer norm in float32 because layer norm sums squares. In "
            "float16, 256 squared overflows; bfloat16 has the range of float32, but its eight "
            "significant bits are few for the sums of a mean and a variance.",
        ),
    )
    heading = "Linear layer, layer norm, linear layer; float32 weights under autocast"
    return (Block(heading=heading, tables=(table,), findings=findings),)


def calculate_accounting(_evidence: Evidence) -> tuple[Block, ...]:
    """Returns the answers to the four accounting questions for xxl."""
    answers = account(model_preset("xxl"))
    states, sharded, fixed, free = (answer.values for answer in answers)
    findings = (
        make_finding(
            "states",
            "(a) Weights, gradients and optimizer state take {state_gib:,.0f} GiB: they fill "
            "{devices_of_80_gib} H100 before any activations. Each token adds "
            "{saved_bytes_per_token} bytes of activations.",
            state_gib=to_gibibytes(states["state_bytes"]),
            **states,
        ),
        make_finding(
            "sharded_states",
            "(b) Without activations, {devices_of_95_gib} devices are enough; with 4096 tokens per "
            "device, {devices_with_4096_tokens} are needed. From {most_tokens_per_device:,.0f} "
            "tokens per device on, no number of devices is enough, because half of the activations "
            "is not sharded.",
            **sharded,
        ),
        make_finding(
            "compute_bound_batch",
            "(c) On 16 by 4 devices (FSDP by tensor parallelism), forward is compute-bound from a "
            "batch of {batch_tokens_add:,.0f} tokens on if the two axes communicate one after the "
            "other, and from {batch_tokens_overlap:,.0f} tokens on if they communicate at the same "
            "time.",
            **fixed,
        ),
        make_finding(
            "compute_bound_batch_of_any_mesh",
            "(d) With the best split of the devices into the two axes, the smallest compute-bound "
            "batch is {batch_tokens_add:,.0f} tokens (one after the other) or "
            "{batch_tokens_overlap:,.0f} tokens (at the same time).",
            "Pipeline stages and all-gathers in lower precision reduce the batch further; gradient "
            "accumulation and longer contexts only make the batch larger.",
            **free,
        ),
    )
    return (Block(heading="xxl, calculated", working=answers, findings=findings),)
