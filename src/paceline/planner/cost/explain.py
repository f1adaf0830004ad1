"""The memory and the step time of one layout with their working: formulas, numbers, assumptions."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from paceline.accounting.explanation import Explanation, WorkedLine
from paceline.accounting.parameters import count_parameters
from paceline.core.errors import UsageError
from paceline.core.plan import ParallelLayout
from paceline.core.units import format_binary_bytes, format_decimal, format_seconds
from paceline.planner.cost.activations import (
    block_bytes_per_token,
    blocks_in_flight,
    logit_bytes,
    matrix_bytes,
    recomputed_bytes,
    score_bytes,
    stream_bytes,
)
from paceline.planner.cost.communication import MeshSpans, gather_time_s, gradient_time_s
from paceline.planner.cost.layouts import Layouts, Workload
from paceline.planner.cost.memory import LayoutMemory, layout_memory
from paceline.planner.cost.memory_traffic import elementwise_bytes, loss_bytes, num_kernels
from paceline.planner.cost.step_time import (
    Cluster,
    StepTime,
    attention_time_s,
    flops_per_pass,
    step_time,
)

_BUSY = ("compute_s", "memory_s", "launch_s", "tensor_s", "context_s", "stages_s")
"""Terms in which a stage does something for a micro-batch."""


def explain_layout(
    layout: ParallelLayout, workload: Workload, cluster: Cluster, *, hidden: float = 1.0
) -> Explanation:
    """Explains what one device of a layout holds, and how long its step takes."""
    if np.size(workload.micro_batch) > 1 or np.size(workload.num_micro_batches) > 1:
        raise UsageError(
            "explain_layout explains one layout: Workload.micro_batch and num_micro_batches must "
            "be numbers, not arrays"
        )
    layouts = Layouts.of([layout])
    memory = layout_memory(layouts, workload)
    terms = step_time(layouts, workload, cluster, hidden=hidden)
    values = {
        f"{field.name}_bytes": _number(getattr(memory.states, field.name))
        for field in dataclasses.fields(memory.states)
    }
    values |= {
        "activations_bytes": _number(memory.activations),
        "working_bytes": _number(memory.working),
        "peak_bytes": _number(memory.total),
    }
    values |= {
        field.name: _number(getattr(terms, field.name)) for field in dataclasses.fields(terms)
    }
    values["step_time_s"] = _number(terms.total_s)
    return Explanation(
        question=f"Memory and step time of one of {layout.world_size} devices: {_named(layout)}",
        assumptions=_assumptions(layout, workload, cluster, hidden),
        steps=(
            *_memory_steps(layout, layouts, workload, memory),
            *_time_steps(layout, layouts, workload, cluster, terms),
        ),
        values=values,
    )


def _assumptions(
    layout: ParallelLayout, workload: Workload, cluster: Cluster, hidden: float
) -> tuple[str, ...]:
    tiers = "; ".join(
        f"{tier.name}: {format_decimal(tier.bytes_per_s, 'B/s')} and "
        f"{format_seconds(tier.latency_s)} per hop"
        for tier in cluster.tiers.tiers
    )
    averaged = "after every micro-batch" if workload.reduces_every_pass else "once in a step"
    return (
        f"per data-parallel rank, micro-batches: {workload.num_micro_batches}, sequences in each: "
        f"{workload.micro_batch}, tokens in a sequence: {workload.context_length}",
        f"{workload.attention} attention, {'with' if workload.dropout else 'no'} dropout, "
        f"activation checkpointing: {layout.activation_checkpointing}",
        f"a device reaches {format_decimal(cluster.flops_per_s, 'FLOP/s')} on matrices and "
        f"{format_decimal(cluster.memory_bytes_per_s, 'B/s')} of memory bandwidth",
        f"links of one device in one direction: {tiers}",
        f"gradients averaged {averaged}; {hidden:.0%} of a pass can hide communication",
        "parameters spread evenly over the stages; neither the allocator's gaps nor what drivers "
        "keep for themselves",
    )


def _memory_steps(
    layout: ParallelLayout, layouts: Layouts, workload: Workload, memory: LayoutMemory
) -> Iterator[WorkedLine]:
    num_parameters = count_parameters(workload.shape).total
    devices = f"({layout.tensor} * {layout.pipeline})"
    sizes = {
        "parameters": workload.parameter_bytes,
        "weight_copies": workload.compute_bytes,
        "gathered": workload.compute_bytes,
        "gradients": workload.gradient_bytes,
        "buckets": workload.reduction_bytes,
        "optimizer_state": workload.optimizer_bytes,
    }
    formulas = {
        "weight_copies": "matrices * bytes / (tensor * pipeline)",
        "gathered": "(2 blocks + the larger of block and embedding, at most all) * bytes / tensor",
        "buckets": "gradients while they are averaged * bytes",
    }
    for name, size in sizes.items():
        held = _number(getattr(memory.states, name))
        if not held:
            continue
        share = num_parameters * size / (layout.tensor * layout.pipeline) / held
        divided = name not in formulas and round(share) > 1
        formula = formulas.get(
            name, "N * bytes / (tensor * pipeline" + (" * shard)" if divided else ")")
        )
        numbers = f"{num_parameters:,} * {size} / {devices}"
        if divided:
            numbers += f" / {layout.shard}"
        if name in formulas:
            numbers = f"{held / size:,.0f} * {size}"
        yield _bytes_step(f"{name.replace('_', ' ')} = {formula}", numbers, held)
    stream, matrices, scores = (
        part(workload) for part in (stream_bytes, matrix_bytes, score_bytes)
    )
    tokens = f"{_number(workload.tokens):,.0f} / {layout.context}"
    blocks = _number(blocks_in_flight(layouts, workload))
    kept = _number(block_bytes_per_token(layouts, workload))
    parts = {
        "none": (
            "(stream / split + matrices / tensor + scores / tensor)",
            f"({stream:,} / {_number(layouts.stream_split):.0f} + {matrices:,} / {layout.tensor} "
            f"+ {scores:,} / {layout.tensor})",
        ),
        "selective": (
            "(stream / split + matrices / tensor)",
            f"({stream:,} / {_number(layouts.stream_split):.0f} + {matrices:,} / {layout.tensor})",
        ),
        "full": ("input of a block", f"{kept:,.0f}"),
    }[layout.activation_checkpointing]
    yield _bytes_step(
        f"activations = {parts[0]} * tokens / context * blocks under way",
        f"{parts[1]} * {tokens} * {blocks:.4g}",
        _number(memory.activations),
    )
    again = _number(recomputed_bytes(layouts, workload))
    logits = _number(logit_bytes(layouts, workload))
    yield _bytes_step(
        "working = what the first stage computes again, or the last stage's logits, "
        "as far as they reach above the activations",
        f"{format_binary_bytes(again)}, or {format_binary_bytes(logits)}",
        _number(memory.working),
    )
    yield _bytes_step(
        "peak = states + activations + working",
        " + ".join(
            format_binary_bytes(_number(part))
            for part in (memory.states.total, memory.activations, memory.working)
        ),
        _number(memory.total),
    )


def _time_steps(
    layout: ParallelLayout, layouts: Layouts, workload: Workload, cluster: Cluster, terms: StepTime
) -> Iterator[WorkedLine]:
    passes = _number(workload.num_micro_batches)
    layers = workload.shape.num_layers / layout.pipeline
    tokens = _number(workload.tokens) / layout.context
    operations = flops_per_pass(layouts, workload)
    matrices = _number(operations.layer_matrices)
    attention = _number(attention_time_s(layouts, workload, cluster))
    head = _number(operations.head) / layout.pipeline
    spans = MeshSpans.of(layouts, cluster.tiers)
    num_parameters = count_parameters(workload.shape).total
    sent, gathered = (
        format_seconds(_number(seconds(layouts, workload, spans, num_parameters)))
        for seconds in (gradient_time_s, gather_time_s)
    )
    busy = sum(_number(getattr(terms, name)) for name in _BUSY)
    moved = _number(elementwise_bytes(layouts, workload))
    loss = _number(loss_bytes(layouts, workload)) / layout.pipeline
    memory_rate = format_decimal(cluster.memory_bytes_per_s, "B/s")
    each = f"{passes:.0f} * {layers:.4g}"
    updated = _number(terms.optimizer_s) * cluster.memory_bytes_per_s / workload.update_bytes
    interleave = layout.pipeline_interleave
    working = {
        "compute_s": (
            "micro-batches * ((layers * FLOPs of matrices + output layer) / FLOP/s "
            "+ layers * attention)",
            f"{passes:.0f} * (({layers:.4g} * {matrices:.4g} + {head:.4g}) / "
            f"{format_decimal(cluster.flops_per_s, 'FLOP/s')} "
            f"+ {layers:.4g} * {format_seconds(attention)})",
        ),
        "memory_s": (
            "micro-batches * tokens * (layers * bytes per token and layer + loss) / bandwidth",
            f"{passes:.0f} * {tokens:,.0f} * ({layers:.4g} * {moved:,.0f} + {loss:,.0f}) / "
            f"{memory_rate}",
        ),
        "launch_s": (
            "micro-batches * layers * kernels * seconds each",
            f"{each} * {_number(num_kernels(layouts, workload)):.0f} * "
            f"{format_seconds(cluster.launch_s)}",
        ),
        "tensor_s": (
            "micro-batches * layers * collectives of the tensor axis",
            f"{each} * {format_seconds(_number(terms.tensor_s) / (passes * layers))}",
        ),
        "context_s": (
            "micro-batches * layers * keys and values gathered",
            f"{each} * {format_seconds(_number(terms.context_s) / (passes * layers))}",
        ),
        "stages_s": (
            "micro-batches * what a stage hands on",
            f"{passes:.0f} * {format_seconds(_number(terms.stages_s) / passes)}",
        ),
        "imbalance_s": (
            "micro-batches * (slowest stage - mean stage)",
            f"{passes:.0f} * {format_seconds(_number(terms.imbalance_s) / passes)}",
        ),
        "bubble_s": (
            "(pipeline - 1) / (interleave * micro-batches) * what the mean stage is busy",
            f"({layout.pipeline} - 1) / ({interleave} * {passes:.0f}) * {format_seconds(busy)}",
        ),
        "data_s": (
            "what passes do not hide of averaging gradients and gathering parameters",
            f"{sent} for all gradients, {gathered} for all parameters, each time",
        ),
        "optimizer_s": (
            "parameters updated * bytes read and written / bandwidth",
            f"{updated:,.0f} * {workload.update_bytes} / {memory_rate}",
        ),
    }
    for name, (formula, numbers) in working.items():
        seconds = _number(getattr(terms, name))
        if seconds or (name == "data_s" and layout.data_parallel * layout.context > 1):
            yield WorkedLine(
                formula=f"{name.removesuffix('_s')} = {formula}",
                numbers=numbers,
                result=format_seconds(seconds),
            )
    yield WorkedLine(
        formula="step = " + " + ".join(name.removesuffix("_s") for name in working),
        numbers=" + ".join(format_seconds(_number(getattr(terms, name))) for name in working),
        result=format_seconds(_number(terms.total_s)),
    )


def _bytes_step(formula: str, numbers: str, num_bytes: float) -> WorkedLine:
    return WorkedLine(formula=formula, numbers=numbers, result=format_binary_bytes(num_bytes))


def _named(layout: ParallelLayout) -> str:
    sizes = {
        name: getattr(layout, name)
        for name in ("replicate", "shard", "tensor", "context", "pipeline")
    }
    named = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return ", ".join(named) or "no axis"


def _number(value: Any) -> float:
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])
