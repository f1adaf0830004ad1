"""The step time and memory of one layout, term by term: formula, numbers and result.

Symbols are those of `paceline.predict.cost.step_time` and `paceline.predict.cost.memory`: m passes
of T tokens per step, L layers on p pipeline stages of v parts. A layer's time is that of one pass.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from paceline.accounting.explanation import Explanation, WorkedLine
from paceline.core.units import format_binary_bytes, format_count, format_decimal, format_seconds
from paceline.planner.search.search import BOUNDS, Candidate
from paceline.planner.search.spec import PerformanceModel, SearchSpec
from paceline.predict.cost.cluster import Cluster
from paceline.predict.cost.communication import (
    CommGroups,
    context_time_s,
    data_slowdown,
    engine_block_s,
    engine_data_s,
    engine_stages_s,
    exposed_all_to_all_s,
    gather_time_s,
    gradient_time_s,
    pipeline_time_s,
    tensor_time_s,
)
from paceline.predict.cost.layouts import Layouts, Workload
from paceline.predict.cost.memory import accumulates_whole_gradients, layout_memory
from paceline.predict.cost.memory_traffic import (
    elementwise_bytes,
    expert_kernels,
    loss_bytes,
    num_kernels,
)
from paceline.predict.cost.step_time import (
    attention_time_s,
    flops_per_pass,
    num_parameters,
    pipeline_bubble,
    small_head_flops,
    small_matmul_flops,
)


class TermLine(NamedTuple):
    """One term of the step time, computed from the numbers that it shows."""

    term: str
    formula: str
    numbers: str
    seconds: float


def explain_choice(
    choice: Candidate, spec: SearchSpec, performance: PerformanceModel
) -> Explanation:
    """Explains the step time and the memory of a layout that a search found."""
    lines = [line for line in term_lines(choice, spec, performance) if line.seconds]
    step_s = choice.step_time_s.value
    steps = [
        WorkedLine(
            formula=f"{_name(line.term)} = {line.formula}",
            numbers=line.numbers,
            result=f"{format_seconds(line.seconds)}{_share_text(line, choice)}",
        )
        for line in lines
    ]
    steps.append(
        WorkedLine(
            formula="step = the sum of these terms",
            numbers=" + ".join(format_seconds(line.seconds) for line in lines).replace(
                " + -", " - "
            ),
            result=format_seconds(step_s),
        )
    )
    steps += _memory_lines(choice, spec)
    return Explanation(
        question=f"Step time and memory of {choice.name} on {choice.devices:,} devices",
        assumptions=(performance.source, *_rates(performance.cluster)),
        steps=tuple(steps),
        values={
            **{line.term: float(line.seconds) for line in lines},
            "step_time_s": step_s,
            "peak_bytes": choice.peak_bytes,
        },
    )


def _share_text(line: TermLine, choice: Candidate) -> str:
    if line.seconds > 0:
        return f", {line.seconds / choice.added_s:.1%} of the step"
    faster = "the framework is" if line.term == "framework_s" else "runs of such sizes are"
    alike = ", in all terms alike" if line.term == "framework_s" else ""
    return (
        f": {faster} faster than the formulas{alike}; shares are of the "
        f"{format_seconds(choice.added_s)} before this"
    )


def _rates(cluster: Cluster) -> Iterator[str]:
    attention = cluster.attention_flops_per_s
    rates = {
        "matmuls": cluster.flops_per_s,
        "attention": cluster.flops_per_s if attention is None else attention,
    }
    texts = [f"{name} at {format_decimal(_number(rate), 'FLOP/s')}" for name, rate in rates.items()]
    memory = format_decimal(_number(cluster.memory_bytes_per_s), "B/s")
    yield ", ".join([*texts, f"memory at {memory}"])
    yield "; ".join(
        f"links of the {tier.name}: {format_decimal(_number(tier.bytes_per_s), 'B/s')} per device "
        f"and direction, {format_seconds(_number(tier.latency_s))} per message"
        for tier in cluster.tiers.tiers
    )


def term_lines(
    choice: Candidate, spec: SearchSpec, performance: PerformanceModel
) -> Iterator[TermLine]:
    """Yields every term of the step time, in the order of `StepTime`."""
    layouts, workload = _one(choice, spec)
    cluster = performance.cluster
    spans = CommGroups.of(layouts, cluster.tiers)
    flops = flops_per_pass(layouts, workload)
    held = num_parameters(layouts, workload)
    passes, stages = choice.batch.accumulation_steps, choice.layout.pipeline
    layers = spec.shape.num_layers / stages
    tokens = _number(workload.tokens / layouts.context)
    rate, bandwidth = _number(cluster.flops_per_s), _number(cluster.memory_bytes_per_s)
    each = f"{passes} x {layers:g}"  # Passes times layers of a stage.

    matrices = _number(flops.layer_matrices + small_matmul_flops(layouts, workload, cluster))
    head = _number(flops.head + small_head_flops(layouts, workload, cluster))
    attention_s = _number(attention_time_s(layouts, workload, cluster))
    yield TermLine(
        "compute_s",
        "m (L / p (matmul FLOPs / rate + attention) + FLOPs of the output layer / (p rate))",
        f"{passes} x ({layers:g} x ({_flops(matrices)} / {_flops(rate)}/s + "
        f"{format_seconds(attention_s)}) + {_flops(head)} / ({stages} x {_flops(rate)}/s))",
        passes * (layers * (matrices / rate + attention_s) + head / (stages * rate)),
    )
    moved = _number(elementwise_bytes(layouts, workload))
    loss = _number(loss_bytes(layouts, workload))
    yield TermLine(
        "memory_s",
        "m T (L / p bytes of a layer + bytes of the loss / p) / bandwidth",
        f"{passes} x {format_count(tokens)} x ({layers:g} x {format_binary_bytes(moved)} + "
        f"{format_binary_bytes(loss)} / {stages}) / {format_decimal(bandwidth, 'B/s')}",
        passes * tokens * (layers * moved + loss / stages) / bandwidth,
    )

    tensor_s = _number(tensor_time_s(layouts, workload, spans))
    context_s = _number(context_time_s(layouts, workload, spans))
    block_s = _number(engine_block_s(layouts, cluster))
    work_s = matrices / rate + attention_s + tokens * moved / bandwidth
    routed_s = _number(exposed_all_to_all_s(layouts, workload, cluster, work_s))
    of_experts = _number(cluster.expert_kernels * expert_kernels(layouts, workload))
    kernels = _number(num_kernels(layouts, workload)) + of_experts
    waits_s = tensor_s + context_s + routed_s
    late_s = max(kernels * _number(cluster.dispatch_s) - work_s - waits_s, 0.0)
    launch_s = kernels * _number(cluster.launch_s) + late_s
    yield TermLine(
        "launch_s",
        "m L / p (kernels x seconds of a launch + what the host is late)",
        f"{each} x ({kernels:g} x {format_seconds(_number(cluster.launch_s))} + "
        f"{format_seconds(late_s)})",
        passes * layers * launch_s,
    )
    for term, what, seconds in (
        ("tensor_s", "collectives of the tensor ranks in a layer", tensor_s),
        ("context_s", "collectives of the context ranks in a layer", context_s),
        ("expert_s", "all-to-alls of a layer that nothing hides", routed_s),
    ):
        yield TermLine(
            term,
            f"m L / p x {what}",
            f"{each} x {format_seconds(seconds)}",
            passes * layers * seconds,
        )
    messages_s = _number(pipeline_time_s(layouts, workload, spans))
    yield TermLine(
        "stages_s",
        "m x messages to and from the next stage",
        f"{passes} x {format_seconds(messages_s)}",
        passes * messages_s,
    )

    layer_s = work_s + launch_s + waits_s + block_s
    measured_s = choice.terms_s["measured_s"] / (passes * layers)
    layer_s += measured_s
    head_s = head / rate + tokens * loss / bandwidth
    mean_s = layers * layer_s + head_s / stages
    slowest_s = max(np.ceil(layers) * layer_s, np.floor(layers) * layer_s + head_s)
    if cluster.oversubscription > 1:
        slowest_s = max(slowest_s / cluster.oversubscription, mean_s)
    yield TermLine(
        "imbalance_s",
        "m (slowest stage - mean stage), of one pass",
        f"{passes} x ({format_seconds(slowest_s)} - {format_seconds(mean_s)})",
        passes * (slowest_s - mean_s),
    )
    through_s = _number(engine_stages_s(layouts, cluster))
    parts: float = choice.layout.pipeline_interleave
    taking_turns: float = stages
    if cluster.oversubscription > 1:
        taking_turns = max(stages / cluster.oversubscription, 1.0)
        parts *= cluster.oversubscription
    busy_s = passes * (mean_s + messages_s + through_s)
    yield TermLine(
        "bubble_s",
        "(p - 1) / (v m) x m (mean stage + messages)",
        f"({taking_turns:g} - 1) / ({parts:g} x {passes}) x {format_seconds(busy_s)}",
        pipeline_bubble(taking_turns, passes, parts) * busy_s,
    )
    slower = _number(data_slowdown(layouts, cluster))
    gradients_s = _number(gradient_time_s(layouts, workload, spans, held)) * slower
    gathered_s = _number(gather_time_s(layouts, workload, spans, held)) * slower
    yield TermLine(
        "data_s",
        "what a pass does not hide of averaging gradients and gathering parameters",
        f"{format_seconds(gradients_s)} and {format_seconds(gathered_s)} per pass beside "
        f"{performance.hidden:.0%} of {format_seconds(slowest_s)}",
        choice.terms_s["data_s"],
    )
    shards = _number(np.where(layouts.stage > 0, layouts.state_shards, 1))
    owned = _number(held / layouts.model_devices) / shards
    update = cluster.update_bytes_per_s or bandwidth
    yield TermLine(
        "optimizer_s",
        "parameters of the rank x bytes of an update / bandwidth",
        f"{format_count(owned)} x {workload.update_bytes} B / {format_decimal(update, 'B/s')}",
        owned * workload.update_bytes / update,
    )
    data_calls_s = _number(engine_data_s(layouts, workload, cluster))
    yield TermLine(
        "engine_s",
        "m (L / p x calls of a layer + calls of a stage) + calls of FSDP2",
        f"{passes} x ({layers:g} x {format_seconds(block_s)} + {format_seconds(through_s)}) + "
        f"{format_seconds(data_calls_s)}",
        passes * (layers * block_s + through_s) + data_calls_s,
    )
    yield TermLine("fixed_s", "fitted", "per step", _number(cluster.step_s))
    yield TermLine(
        "measured_s",
        "m L / p x what runs of such sizes took beyond the formulas",
        f"{each} x {format_seconds(measured_s)}",
        choice.terms_s["measured_s"],
    )
    others = choice.step_time_s.value - choice.terms_s["framework_s"]
    slowdown = _number(cluster.slowdown)
    yield TermLine(
        "framework_s",
        "(factor of the framework - 1) x all other terms",
        f"({slowdown:.3f} - 1) x {format_seconds(others)}",
        (slowdown - 1) * others,
    )


def _memory_lines(choice: Candidate, spec: SearchSpec) -> Iterator[WorkedLine]:
    layouts, workload = _one(choice, spec)
    held = layout_memory(layouts, workload)
    states = {
        "parameters": held.states.parameters,
        "copies of weights": held.states.weight_copies,
        "gathered units": held.states.gathered,
        "gradients": held.states.gradients,
        "buckets": held.states.buckets,
        "optimizer state": held.states.optimizer_state,
    }
    if _number(accumulates_whole_gradients(layouts, workload)):
        stage, passes = int(_number(layouts.stage)), int(_number(workload.num_micro_batches))
        gradients = _number(held.states.gradients)
        size = workload.gradient_bytes + workload.framework_memory.low_gradient_bytes
        yield WorkedLine(
            formula=(
                "gradients = all of the rank's parameters x bytes: they are averaged once for "
                f"{passes} passes, until when ZeRO-{stage} does not shard them"
            ),
            numbers=f"{format_count(gradients / size)} x {size:g} B",
            result=format_binary_bytes(gradients),
        )
    parts = {
        "states": held.states.total,
        "activations": held.activations,
        "recomputed block or logits": held.working,
        "framework": held.framework,
    }
    for whole, of in (("states", states), ("peak memory", parts)):
        sizes = {name: _number(size) for name, size in of.items() if _number(size)}
        yield WorkedLine(
            formula=f"{whole} = {' + '.join(sizes)}",
            numbers=" + ".join(map(format_binary_bytes, sizes.values())),
            result=format_binary_bytes(sum(sizes.values())),
        )


def _one(choice: Candidate, spec: SearchSpec) -> tuple[Layouts, Workload]:
    """Returns a choice as arrays of one layout, as the formulas take it."""
    layouts = dataclasses.replace(
        Layouts.of([choice.layout]), shards_context=spec.framework_settings.shards_context
    )
    return layouts, spec.workload(
        np.array([choice.batch.num_sequences]), np.array([choice.batch.accumulation_steps])
    )


def _number(value: Any) -> float:
    return float(np.asarray(value, dtype=float).reshape(-1)[0])


def _flops(value: float) -> str:
    return format_decimal(value, "FLOP")


def _name(term: str) -> str:
    return BOUNDS[term] + (" of the optimizer" if term == "optimizer_s" else "")
