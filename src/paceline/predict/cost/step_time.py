"""Step time by term in closed form, for arrays of layouts.

A device of a mesh with t tensor, c context and p pipeline ranks processes q / c tokens of each of
its m micro-batches, in L / p layers. Per layer and micro-batch:

    matrices      2 FLOPs per weight and token forward, 4 backward, 2 if fully recomputed
    attention     4 FLOPs per score and channel forward, 8 backward. Flash computes only the causal
                  half of the scores, and repeats half of forward in backward. Stored scores are
                  also read and written; the larger of compute and memory time counts
    memory        bytes of elementwise kernels over memory bandwidth (`memory_traffic`)
    launches      exposed seconds per kernel launch, if the cluster has any
    tensor, context, expert, stages   communication that every layer or stage waits for
                  (`communication`). In an interleaved pipeline, work of other parts hides a share
                  of the all-to-alls, if calibrated

and per step

    imbalance     the slowest stage sets the pace of every micro-batch: the last stage also has the
                  output layer and the loss, and p may not divide L evenly
    bubble        (p - 1) / (v m) of the mean stage's busy time
    data          exposed communication of averaging gradients and gathering parameters; `hidden`
                  is the fraction of a pass that can hide it
    optimizer     bytes read and written to update a rank's own parameters, over bandwidth
    engine        size-independent overhead of torch's calls, if calibrated: per block and pass,
                  per stage and pass, per FSDP2 collective
    framework     a share of all other terms, if calibrated

If o ranks share a processor, one rank computes while another waits. p stages on p / o processors
then have the bubble of p / o stages with o v parts each, and a stage sets the pace only if it has
more than o times the mean work.

Selective recomputation repeats attention's matmuls and softmax if scores are stored. The model is
meant for comparing layouts. Exposed communication is the limit of many buckets without latency
(`least_exposed_s`), in closed form so that a million layouts take two seconds.
`paceline.accounting.overlap` simulates the buckets of a single layout.

A matmul of M tokens with a matrix of K rows and N columns has 2 M N K FLOPs, at the rate R of large
matmuls. Small matmuls do not reach R: the tile pipeline must fill and drain along every dimension,
and operands are read and results written. With a characteristic length for each dimension,

    seconds = 2 M N K / R · (1 + m / M + w / N + w / K) · (1 + u, where N or K is misaligned)

m is `Cluster.matmul_tokens`, w `Cluster.matmul_width`, and u `Cluster.misaligned`: tensor cores
need widths that are multiples of the 128-element tile. Tensor parallelism divides N of the first
matrices of a branch (queries, keys, values; up) and K of the last one. Backward is two such
matmuls, and full recomputation one more. m, w and u are 0 unless a calibration sets them.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from paceline.accounting.collectives import Numbers
from paceline.accounting.counts import count_parameters, inactive_parameters
from paceline.core.errors import UsageError
from paceline.predict.cost.cluster import Cluster
from paceline.predict.cost.communication import (
    CommGroups,
    context_time_s,
    engine_block_s,
    engine_data_s,
    engine_stages_s,
    exposed_all_to_all_s,
    exposed_data,
    pipeline_time_s,
    tensor_time_s,
)
from paceline.predict.cost.layouts import CHECKPOINTING, Layouts, Workload
from paceline.predict.cost.memory_traffic import (
    elementwise_bytes,
    expert_kernels,
    loss_bytes,
    num_kernels,
    score_product_bytes,
)

_TILE = 128


class Matrix(NamedTuple):
    """Columns and rows of a matrix on one tensor rank, and the number of them per block."""

    columns: Any
    rows: Any
    number: float = 1.0


def block_matrices(layouts: Layouts, workload: Workload) -> Iterator[Matrix]:
    """Yields the matrices of one block on one tensor rank."""
    shape, ranks = workload.shape, layouts.tensor
    width = shape.d_model
    if shape.has_attention:
        projected = shape.attention_width + 2 * shape.key_value_width
        yield Matrix(projected / ranks, width)
        yield Matrix(width, shape.attention_width / ranks)
    opening = 2 if shape.feed_forward == "swiglu" else 1
    yield Matrix(shape.d_ff / ranks, width, opening)
    yield Matrix(width, shape.d_ff / ranks)


def small_matmul_flops(layouts: Layouts, workload: Workload, cluster: Cluster) -> Any:
    """Returns the time lost to small matmuls per layer and pass, in FLOPs at the full rate."""
    lengths = (cluster.matmul_tokens, cluster.matmul_width, cluster.misaligned)
    if not any(np.any(length) for length in lengths):
        return 0.0
    tokens = workload.tokens / layouts.context
    lost: Any = 0.0
    for matrix in block_matrices(layouts, workload):
        lost = lost + matrix.number * _lost_flops(tokens, matrix, cluster)
    return lost * (2 + workload.forwards(layouts))


def small_head_flops(layouts: Layouts, workload: Workload, cluster: Cluster) -> Any:
    """Returns the equivalent of `small_matmul_flops` for the output layer per pass.

    The output layer is never recomputed.
    """
    matrix = Matrix(workload.shape.vocab_size / layouts.tensor, workload.shape.d_model)
    return 3 * _lost_flops(workload.tokens / layouts.context, matrix, cluster)


def _lost_flops(tokens: Any, matrix: Matrix, cluster: Cluster) -> Any:
    columns, rows = matrix.columns, matrix.rows
    area = np.multiply(columns, rows)
    edges = cluster.matmul_tokens * area + cluster.matmul_width * tokens * np.add(columns, rows)
    if not np.any(cluster.misaligned):
        return 2 * edges
    is_misaligned = (np.mod(columns, _TILE) != 0) | (np.mod(rows, _TILE) != 0)
    longer = np.where(is_misaligned, cluster.misaligned, 0.0)
    return 2 * (edges + longer * (tokens * area + edges))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step by term, as arrays shaped like the layouts'."""

    compute_s: Any
    """Matrices and attention, averaged over the stages."""
    memory_s: Any
    launch_s: Any
    tensor_s: Any
    context_s: Any
    expert_s: Any
    """All-to-alls of tokens to experts and back."""
    stages_s: Any
    imbalance_s: Any
    bubble_s: Any
    data_s: Any
    optimizer_s: Any
    engine_s: Any
    """Size-independent overhead of torch's engine: DTensor dispatch, FSDP2 hooks."""
    fixed_s: Any
    """Fixed time per step."""
    measured_s: Any
    """Correction from measured runs of the same sizes; negative if they were faster."""
    framework_s: Any
    """What the framework takes beyond all other terms; negative if it is faster."""

    @property
    def total_s(self) -> Any:
        """Sum of all terms."""
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))


class FlopsPerPass(NamedTuple):
    """FLOPs of one device in one pass, including recomputation."""

    layer_matrices: Any
    layer_attention: Any
    head: Any
    """FLOPs of the output layer, which is in the last stage."""


def flops_per_pass(layouts: Layouts, workload: Workload) -> FlopsPerPass:
    """Returns the FLOPs of one device per pass, for a layer and for the output layer."""
    shape = workload.shape
    counted = count_parameters(shape)
    tokens = workload.tokens / layouts.context / layouts.tensor
    weights = (counted.attention + counted.feed_forward) / shape.num_layers
    full = layouts.checkpointing == CHECKPOINTING["full"]
    if workload.attention == "flash":
        keys_per_query, times = (workload.context_length + 1) / 2, np.where(full, 4.5, 3.5)
    else:
        keys_per_query = workload.context_length
        times = np.where(layouts.checkpointing == CHECKPOINTING["none"], 3, 4)
    return FlopsPerPass(
        layer_matrices=2 * weights * tokens * (2 + workload.forwards(layouts)),
        layer_attention=4 * shape.attention_width * keys_per_query * tokens * times,
        head=6 * shape.vocab_size * shape.d_model * tokens,
    )


def attention_time_s(layouts: Layouts, workload: Workload, cluster: Cluster) -> Any:
    """Returns the seconds of attention's matmuls per layer and pass, compute- or memory-bound."""
    operations = flops_per_pass(layouts, workload).layer_attention
    moved = score_product_bytes(layouts, workload) * workload.tokens / layouts.context
    rate = cluster.attention_flops_per_s
    rate = cluster.flops_per_s if rate is None else rate
    return np.maximum(operations / rate, moved / cluster.memory_bytes_per_s)


def step_time(
    layouts: Layouts, workload: Workload, cluster: Cluster, *, hidden: Numbers = 1.0
) -> StepTime:
    """Returns the terms of every layout. A fraction `hidden` of a pass can hide communication."""
    if np.min(hidden) < 0 or np.max(hidden) > 1:
        raise UsageError(f"hidden is {hidden}; it is a fraction of a pass, from 0 to 1")
    spans = CommGroups.of(layouts, cluster.tiers)
    operations = flops_per_pass(layouts, workload)
    held_parameters = num_parameters(layouts, workload)
    passes, stages = np.asarray(workload.num_micro_batches), layouts.pipeline
    layers = workload.shape.num_layers / stages
    tokens = workload.tokens / layouts.context
    flops_per_s, bandwidth = cluster.flops_per_s, cluster.memory_bytes_per_s

    # Per layer and micro-batch.
    matrices = operations.layer_matrices + small_matmul_flops(layouts, workload, cluster)
    attention_s = attention_time_s(layouts, workload, cluster)
    moved = elementwise_bytes(layouts, workload)
    of_experts = cluster.expert_kernels * expert_kernels(layouts, workload)
    kernels = num_kernels(layouts, workload) + of_experts
    tensor_s = tensor_time_s(layouts, workload, spans)
    context_s = context_time_s(layouts, workload, spans)
    work_s = matrices / flops_per_s + attention_s + tokens * moved / bandwidth
    routed_s = exposed_all_to_all_s(layouts, workload, cluster, work_s)
    waits_s = tensor_s + routed_s
    # The host runs ahead of the device, so launches count only if they exceed the layer's work.
    late_s = np.maximum(kernels * cluster.dispatch_s - (work_s + waits_s + context_s), 0.0)
    launch_s = kernels * cluster.launch_s + late_s
    block_s = engine_block_s(layouts, cluster)
    layer_s = work_s + launch_s + waits_s + context_s + block_s
    measured_s = layer_s * (_cell_factor(layouts, workload, cluster) - 1)
    layer_s = layer_s + measured_s

    # Per stage and micro-batch.
    head = operations.head + small_head_flops(layouts, workload, cluster)
    loss = loss_bytes(layouts, workload)
    head_s = head / flops_per_s + tokens * loss / bandwidth
    mean_s = layers * layer_s + head_s / stages
    slowest_s = np.maximum(np.ceil(layers) * layer_s, np.floor(layers) * layer_s + head_s)
    shared = cluster.oversubscription
    slowest_s = np.maximum(slowest_s / shared, mean_s) if shared > 1 else slowest_s
    messages_s = pipeline_time_s(layouts, workload, spans)
    through_stages_s = engine_stages_s(layouts, cluster)
    busy_s = passes * (mean_s + (messages_s + through_stages_s))

    # Per step.
    engine_s = passes * (layers * block_s + through_stages_s)
    shards = np.where(layouts.stage > 0, layouts.state_shards, 1)
    owned = held_parameters / layouts.model_devices / shards
    update_rate = bandwidth if cluster.update_bytes_per_s is None else cluster.update_bytes_per_s
    steps = StepTime(
        compute_s=passes
        * ((layers * matrices + head / stages) / flops_per_s + layers * attention_s),
        memory_s=passes * tokens * (layers * moved + loss / stages) / bandwidth,
        launch_s=passes * layers * launch_s,
        tensor_s=passes * layers * tensor_s,
        context_s=passes * layers * context_s,
        expert_s=passes * layers * routed_s,
        stages_s=passes * messages_s,
        imbalance_s=passes * (slowest_s - mean_s),
        bubble_s=_bubble(layouts, passes, shared) * busy_s,
        data_s=exposed_data(layouts, workload, spans, slowest_s, held_parameters, hidden, cluster),
        optimizer_s=owned * workload.update_bytes / update_rate,
        engine_s=engine_s + engine_data_s(layouts, workload, cluster),
        fixed_s=cluster.step_s,
        measured_s=passes * layers * measured_s,
        framework_s=0.0,
    )
    return dataclasses.replace(steps, framework_s=(cluster.slowdown - 1) * steps.total_s)


def _bubble(layouts: Layouts, passes: Any, shared: float) -> Any:
    """Returns the pipeline bubble if `shared` ranks share a processor."""
    stages: Any = layouts.pipeline
    parts: Any = layouts.pipeline_interleave
    if shared > 1:
        stages, parts = np.maximum(stages / shared, 1.0), parts * shared
    return pipeline_bubble(stages, passes, parts)


def pipeline_bubble(num_stages: Any, num_micro_batches: Any, interleave: Any = 1) -> Any:
    """Returns the ratio of a pipeline's idle time to its busy time, (p - 1) / (v m)."""
    return (num_stages - 1) / (interleave * num_micro_batches)


def num_parameters(layouts: Layouts, workload: Workload) -> Any:
    """Returns the parameters of a model, with experts scaled to their division over ranks."""
    total: Any = count_parameters(workload.shape).total
    if workload.experts is None:
        return total
    # Experts are divided over the expert axis instead of the tensor axis.
    idle = inactive_parameters(workload.experts, workload.shape)
    return total + idle * layouts.tensor / layouts.expert


def _cell_factor(layouts: Layouts, workload: Workload, cluster: Cluster) -> Any:
    if cluster.cells is None:
        return 1.0
    tokens = workload.tokens / layouts.context
    return cluster.cells.factor(tokens, workload.shape.d_model, layouts.tensor)
