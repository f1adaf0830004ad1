"""Answers by calculation: they need no measurement, and use one where it makes them concrete."""

import functools
import pathlib
from collections.abc import Iterator

import msgspec
import numpy as np

from paceline.accounting import (
    attention_saved_bytes,
    count_parameters,
    model_state_bytes,
    step_memory,
)
from paceline.accounting.memory.activations import saved_for_backward_bytes
from paceline.accounting.overlap import explain_overhead
from paceline.core.presets import model_preset
from paceline.core.specs import BatchShape, precision_preset
from paceline.core.strategies import StrategyName
from paceline.core.units import format_binary_bytes, to_gibibytes
from paceline.course.accounting import account
from paceline.course.answers import Answer, Row, row
from paceline.course.parallel import BASELINE, SHARDED
from paceline.records import Record, join_key
from paceline.reports.document import Block, picture_of
from paceline.reports.plots.attention import plot_tiles
from paceline.reports.plots.scaling_laws import SCALING_PLOTS
from paceline.reports.plots.strategies import plot_designs
from paceline.reports.record_sets import OVER, RecordSet, describe_topology, has_peers
from paceline.reports.tables.scaling import methods_table, waste_table
from paceline.reports.tables.table import Table
from paceline.scaling import decide, diagnose, fit, read_sweep, synthetic_sweep
from paceline.scaling.decide import Decision
from paceline.scaling.surface import EPOCH

_TERM, _NUM_TERMS, _EXACT = 0.01, 1000, 10.0
_CONTEXTS = (128, 256, 512)
_ZERO_STAGES: dict[StrategyName, tuple[str, str, str]] = {
    BASELINE: ("nothing", "all-reduce", "2 Ψ"),
    SHARDED: ("optimizer state (ZeRO-1)", "all-reduce, then all-gather", "3 Ψ"),
    "zero2": ("gradients too (ZeRO-2)", "reduce-scatter, then all-gather", "2 Ψ"),
    "fsdp": ("parameters too (ZeRO-3)", "reduce-scatter, all-gather twice", "3 Ψ"),
}
_OVERHEAD_INPUTS = {
    "gradient_bytes": "total_bytes",
    "algorithm_bandwidth_bytes_per_s": "bytes_per_s",
    "latency_s": "latency_s",
}
"""The argument of the overhead equation for each metric of a prediction."""
# Used without measurements: a model of 2e9 float32 parameters on fast links.
_EXAMPLE = {"total_bytes": 8e9, "bytes_per_s": 1e11, "latency_s": 2e-5}
_BUDGETS = (1e23, 1e24)
_LEVEL = 0.9
_NUM_DRAWS = 200
_NOISE = 0.003
"""Noise of the synthetic runs: the spread of repeated runs."""


def sums(_evidence: RecordSet) -> Iterator[Answer]:
    """Yields the results of adding 0.01 a thousand times with four pairs of dtypes."""
    full, half, mixed = (
        _repeated_sum(*dtypes)
        for dtypes in (("float32", "float32"), ("float16", "float16"), ("float32", "float16"))
    )
    results = (
        ("float32", "float32", full),
        ("float16", "float16", half),
        ("float32", "float16", mixed),
        ("float32", "float16, cast to float32 first", mixed),
    )
    table = Table(
        headers=("sum", "term", "result", "error"),
        rows=tuple((*names, f"{sum_:.4f}", f"{sum_ - _EXACT:+.4f}") for *names, sum_ in results),
        caption="rounded to the dtype of the sum after every addition",
    )
    spacing, term = float(np.spacing(np.float16(half))), float(np.float16(_TERM))
    numbers = row("sums", float16_sum=half, spacing=spacing, mixed_sum=mixed, term=term)
    block = Block(heading="0.01 added a thousand times, calculated", tables=(table,))
    yield Answer(block, [numbers])


def _repeated_sum(sum_dtype: str, term_dtype: str) -> float:
    """Returns the sum, rounded to its dtype after every addition."""
    term, total = np.dtype(term_dtype).type(_TERM), np.dtype(sum_dtype).type(0)
    for _ in range(_NUM_TERMS):
        total = np.dtype(sum_dtype).type(total + term)
    return float(total)


def autocast_dtypes(_evidence: RecordSet) -> Iterator[Answer]:
    """Yields the dtype of each tensor of a linear, layer norm, linear stack under autocast."""
    table = Table(
        headers=("tensor", "on CUDA", "on a CPU"),
        rows=(
            ("parameters inside the autocast region", "float32", "float32"),
            ("output of the first linear layer", "bf16 or fp16", "bf16 or fp16"),
            ("output of the layer norm", "float32", "bf16 or fp16"),
            ("logits", "bf16 or fp16", "bf16 or fp16"),
            ("loss (cross-entropy)", "float32", "float32"),
            ("gradients of the parameters", "float32", "float32"),
        ),
        caption="checked by tests/unit/models/test_mixed_precision.py",
    )
    heading = "Linear layer, layer norm, linear layer; float32 weights under autocast"
    yield Answer(Block(heading=heading, tables=(table,)), [row("autocast_dtypes")])


def course_model_memory(_evidence: RecordSet) -> Iterator[Answer]:
    """Yields the memory of the 2.7B model, which is too large for most machines."""
    shape, precision, num_sequences = model_preset("2.7B"), precision_preset("float32"), 4
    sizes = []
    for context in _CONTEXTS:
        batch = BatchShape(num_sequences=num_sequences, context_length=context)
        instants = step_memory(shape, batch, precision, "none", 1, attention="naive")
        step = instants["before_step"]
        sizes.append(
            {
                "residual stream": 4 * batch.tokens_per_pass * shape.d_model,
                "scores of a layer": 4 * num_sequences * shape.num_heads * context**2,
                "saved for backward": saved_for_backward_bytes(shape, batch, attention="naive"),
                "states and gradients": step.total - step.activations,
                "peak of a training step": step.total,
            }
        )
    first, last = sizes[0], sizes[-1]
    table = Table(
        headers=("context", *first),
        rows=tuple(
            (str(context), *map(format_binary_bytes, parts.values()))
            for context, parts in zip(_CONTEXTS, sizes, strict=True)
        ),
        caption="one rank, attention that stores its scores, second step and later",
    )
    numbers = row(
        "course_model_memory",
        first_context=_CONTEXTS[0],
        residual_bytes=first["residual stream"],
        first_bytes=first["peak of a training step"],
        last_context=_CONTEXTS[-1],
        last_bytes=last["peak of a training step"],
        scores_bytes=last["scores of a layer"],
        matrix_bytes=4 * shape.d_model * shape.d_ff,
    )
    yield Answer(Block(heading="2.7B, batch 4, float32, calculated", tables=(table,)), [numbers])


def score_memory(_evidence: RecordSet) -> Iterator[Answer]:
    """Yields the memory of attention in a configuration that runs out of memory."""
    batch = BatchShape(num_sequences=8, context_length=16384)
    scores = 4 * batch.num_sequences * batch.context_length**2
    saved, tiled = (
        attention_saved_bytes(name, batch, 16, 4, causal=False) for name in ("naive", "tiled")
    )
    parts = (
        ("one matrix of scores", "4 B N²", scores),
        ("saved for backward", "3 · 4 B N D + 4 B N²", saved),
        ("scores, probabilities and a gradient, at the peak", "at least 3 · 4 B N²", 3 * scores),
        ("saved if tiles are recomputed in backward", "4 · 4 B N D + 4 B N", tiled),
    )
    table = Table(
        headers=("part", "formula", "memory"),
        rows=tuple((*texts, format_binary_bytes(size)) for *texts, size in parts),
        caption="B sequences of N tokens, heads of dimension D",
    )
    numbers = row(
        "score_memory",
        probabilities_bytes=scores,
        saved_bytes=saved,
        tiled_saved_bytes=tiled,
        saved_ratio=saved / tiled,
    )
    heading = "Batch 8, length 16384, head dim 16, float32, calculated"
    yield Answer(Block(heading=heading, tables=(table,)), [numbers])


def tiles(_evidence: RecordSet) -> Iterator[Answer]:
    """Yields a diagram of the tiles that FlashAttention-2 computes, and the memory it saves."""
    batch = BatchShape(num_sequences=1, context_length=16384)
    naive, tiled = (
        attention_saved_bytes(name, batch, 64, 2, causal=True) for name in ("naive", "tiled")
    )
    picture = picture_of(plot_tiles(), "attention-tiles", "Tiles of the scores by program")
    numbers = row("tiles", naive_saved_bytes=naive, tiled_saved_bytes=tiled)
    heading = "What FlashAttention-2 computes and saves"
    yield Answer(Block(heading=heading, pictures=(picture,)), [numbers])


def equality(_evidence: RecordSet) -> Iterator[Answer]:
    """Yields the command and the test that show equality with training in one process."""
    yield Answer(Block(heading="Equality with one process"), [row("equality")])


def overhead(record_set: RecordSet) -> Iterator[Answer]:
    """Yields the overhead and best bucket size, from measurements if available."""
    source = "values of an example: 2e9 parameters in float32, 100 GB/s, 20 µs per call"
    inputs, without = _EXAMPLE, None
    for record in record_set.predictions("ddp"):
        # A fit with zero slope gives no bandwidth; a fit through the origin gives no latency.
        found = {
            name: metric.value
            for key, name in _OVERHEAD_INPUTS.items()
            if (metric := record.metrics.get(key)) is not None and metric.value > 0
        }
        if len(found) == len(_OVERHEAD_INPUTS) and has_peers(record):
            source = f"measured values: {record.case['model']} on {describe_topology(record)}"
            inputs, without = found, _without_communication(record_set, record)
            break
    working = [explain_overhead(**inputs)]
    if without is not None:
        backward_s = without.metrics["backward_time_s"].value
        working.append(explain_overhead(**inputs, backward_s=backward_s))
    description = "Four ways to average gradients, simulated with the overlap recurrence"
    picture = picture_of(plot_designs(), "data-parallel-designs", description)
    block = Block(heading=f"With {source}", working=tuple(working), pictures=(picture,))
    yield Answer(block, [row("overhead", working[0].values)])


def _without_communication(record_set: RecordSet, predicted: Record) -> Record | None:
    """Returns the newest same step without communication, which gives the time of backward."""
    strategy = {field: predicted.case[field] for field in OVER}
    same = [
        record
        for record in record_set.find("ddp", strategy="none")
        if record.metrics
        and record.metrics["backward_time_s"].value > 0
        and join_key(msgspec.structs.replace(record, case={**record.case, **strategy}))
        == join_key(predicted)
    ]
    return same[-1] if same else None


def large_model_accounting(_evidence: RecordSet) -> Iterator[Answer]:
    """Yields the answers to the four accounting questions for xxl."""
    working = account(model_preset("xxl"))
    states, sharded, fixed, free = (each.values for each in working)
    meshes = {f"{name}_fixed": value for name, value in fixed.items()}
    meshes |= {f"{name}_free": value for name, value in free.items()}
    state_gib = to_gibibytes(states["state_bytes"])
    numbers = row("large_model_accounting", states, sharded, meshes, state_gib=state_gib)
    yield Answer(Block(heading="xxl, calculated", working=working), [numbers])


def zero_stages(_evidence: RecordSet) -> Iterator[Answer]:
    """Yields the model states and communication volume of each ZeRO stage."""
    shape, num_ranks = model_preset("xl"), 2
    rows, totals = [], {}
    for strategy, (sharded, collectives, volume) in _ZERO_STAGES.items():
        held = model_state_bytes(shape, precision_preset("float32"), strategy, num_ranks)
        states = (held.parameters, held.gradients, held.optimizer_state)
        totals[strategy] = sum(states)
        texts = map(format_binary_bytes, (*states, totals[strategy]))
        rows.append((strategy, sharded, *texts, collectives, volume))
    table = Table(
        headers=(
            *("strategy", "sharded", "parameters", "gradients", "optimizer state"),
            *("total", "communication", "sent per rank"),
        ),
        rows=tuple(rows),
        caption="float32, without activations; Ψ is the size of the gradients, and volumes are for "
        "many ranks",
    )
    sizes = {"unsharded_bytes": totals[BASELINE], "sharded_bytes": totals[SHARDED]}
    heading = f"xl, {count_parameters(shape).total:,} parameters, {num_ranks} ranks"
    yield Answer(Block(heading=heading, tables=(table,)), [row("zero_stages", sizes)])


def best_allocation(record_set: RecordSet) -> Iterator[Answer]:
    """Yields the compute-optimal model size and number of tokens at 1e23 and 1e24 FLOPs."""
    yield _best_allocation(record_set.runs)


@functools.cache
def _best_allocation(runs: pathlib.Path | None) -> Answer:
    if runs is None:
        sweep = synthetic_sweep(EPOCH, noise=_NOISE)
        source = "Synthetic runs from a known loss surface with noise"
    else:
        sweep, source = read_sweep(runs), f"Runs in {runs.name}"
    found = fit(sweep, num_draws=_NUM_DRAWS)
    decisions = decide(found, _BUDGETS, level=_LEVEL)
    block = Block(
        heading=f"{source}: {len(found.sweep)} runs, {len(found.sweep.budgets)} budgets",
        tables=(methods_table(found, decisions, _LEVEL), waste_table(decisions[-1])),
        pictures=tuple(
            picture_of(SCALING_PLOTS[name](found), name, name.replace("-", " ").capitalize())
            for name in ("scaling-profiles", "scaling-laws")
        ),
        findings=tuple(diagnose(found, _BUDGETS, _LEVEL)),
    )
    return Answer(block, [_allocation_row(decision) for decision in decisions])


def _allocation_row(decision: Decision) -> Row:
    by_method = {answer.method: answer for answer in decision.answers}
    best = by_method.get(decision.method, decision.answers[-1])
    return row(
        "best_allocation",
        flops=f"{decision.compute:.0e}",
        extrapolation=decision.extrapolation,
        method=best.method,
        parameters=best.parameters.value,
        parameters_low=best.parameters.low,
        parameters_high=best.parameters.high,
        tokens=best.tokens.value,
        tokens_per_parameter=best.tokens.value / best.parameters.value,
    )
