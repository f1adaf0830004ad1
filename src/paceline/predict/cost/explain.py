"""Explains the memory and step time of one layout: formulas, numbers, assumptions."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from paceline.accounting.explanation import Explanation, Quantity, WorkedLine, first_number
from paceline.core.errors import UsageError
from paceline.core.plan import ParallelLayout
from paceline.core.units import format_binary_bytes, format_decimal, format_seconds
from paceline.predict.cost.activations import kept_activations, logit_bytes, recomputed_bytes
from paceline.predict.cost.cluster import Cluster
from paceline.predict.cost.layouts import Layouts, Workload
from paceline.predict.cost.memory import LayoutMemory, layout_memory, state_quantities
from paceline.predict.cost.step_time import step_quantities

_NAMED_AXES = ("replicate", "shard", "tensor", "context", "pipeline")


def explain_layout(
    layout: ParallelLayout, workload: Workload, cluster: Cluster, *, hidden: float = 1.0
) -> Explanation:
    """Returns an explanation of the memory and step time of one device of a layout."""
    if np.size(workload.micro_batch) > 1 or np.size(workload.num_micro_batches) > 1:
        raise UsageError(
            "explain_layout explains one layout: Workload.micro_batch and num_micro_batches must "
            "be numbers, not arrays"
        )
    layouts = Layouts.of([layout])
    memory = layout_memory(layouts, workload)
    terms = step_quantities(layouts, workload, cluster, hidden=hidden)
    parts = dataclasses.asdict(memory.states)
    parts |= {"activations": memory.activations, "working": memory.working, "peak": memory.total}
    values = {f"{name}_bytes": first_number(part) for name, part in parts.items()}
    values |= {name: first_number(quantity.value) for name, quantity in terms.items()}
    values["step_time_s"] = sum(values[name] for name in terms)
    sizes = {axis: getattr(layout, axis) for axis in _NAMED_AXES}
    axes = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    return Explanation(
        question=f"Memory and step time of one of {layout.world_size} devices: {axes or 'no axis'}",
        assumptions=_assumptions(layout, workload, cluster, hidden),
        steps=(*_memory_lines(layouts, workload, memory), *_time_lines(layout, terms)),
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
        f"a device reaches {format_decimal(cluster.flops_per_s, 'FLOP/s')} on matmuls and "
        f"{format_decimal(cluster.memory_bytes_per_s, 'B/s')} of memory bandwidth",
        f"links of one device in one direction: {tiers}",
        f"gradients averaged {averaged}; {hidden:.0%} of a pass can hide communication",
        "parameters of the fullest stage; without fragmentation of the allocator and memory of "
        "the driver",
    )


def _memory_lines(
    layouts: Layouts, workload: Workload, memory: LayoutMemory
) -> Iterator[WorkedLine]:
    quantities = state_quantities(layouts, workload)
    quantities["activations"] = kept_activations(layouts, workload)
    for name, quantity in quantities.items():
        if first_number(quantity.value):
            yield _line(name.replace("_", " "), quantity, format_binary_bytes)
    recomputed = format_binary_bytes(first_number(recomputed_bytes(layouts, workload)))
    logits = format_binary_bytes(first_number(logit_bytes(layouts, workload)))
    yield WorkedLine(
        formula="working = recomputed activations of the first stage, or logits of the last "
        "stage, as far as they exceed the activations",
        numbers=f"{recomputed}, or {logits}",
        result=format_binary_bytes(first_number(memory.working)),
    )
    parts = {
        "states": memory.states.total,
        "activations": memory.activations,
        "working": memory.working,
    }
    yield _sum_line("peak", parts, format_binary_bytes)


def _time_lines(layout: ParallelLayout, quantities: Mapping[str, Quantity]) -> Iterator[WorkedLine]:
    for name, quantity in quantities.items():
        is_hidden = name == "data_s" and layout.data_parallel * layout.context > 1
        if first_number(quantity.value) or is_hidden:
            yield _line(name.removesuffix("_s"), quantity, format_seconds)
    parts = {name.removesuffix("_s"): quantity.value for name, quantity in quantities.items()}
    yield _sum_line("step", parts, format_seconds)


def _line(name: str, quantity: Quantity, show: Callable[[float], str]) -> WorkedLine:
    result = show(first_number(quantity.value))
    return WorkedLine(f"{name} = {quantity.formula}", quantity.numbers, result)


def _sum_line(name: str, parts: Mapping[str, Any], show: Callable[[float], str]) -> WorkedLine:
    values = [first_number(value) for value in parts.values()]
    numbers = " + ".join(map(show, values))
    return WorkedLine(f"{name} = {' + '.join(parts)}", numbers, show(sum(values)))
