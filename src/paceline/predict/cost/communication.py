"""Communication time of each mesh axis on tiered links, for arrays of layouts.

For q tokens of width h in one pass of a data-parallel rank, with elements of e bytes, t tensor
ranks, c context ranks, and a device that holds N / (t p) parameters before sharding:

    tensor      two all-reduces of e q h / c bytes per layer forward, two backward, two more if
                forward is fully recomputed; with sequence parallelism each is a reduce-scatter
                and an all-gather of the same bytes (Korthikanti et al. 2022)
    context     one all-gather of keys and values per layer forward, one backward and one more if
                forward is fully recomputed; a reduce-scatter of their gradients
    pipeline    e q h / (c t) bytes to the next stage and back for each of v parts; without sequence
                parallelism each tensor rank sends its part and the receiver all-gathers the whole
                (Narayanan et al. 2021)
    experts     two all-to-alls forward, two backward and two more if forward is recomputed, of
                e q h k / (c t) bytes for k experts per token; if i of x expert ranks share a host,
                (i - 1) / x of the bytes stay inside it and (x - i) / x leave it
    gradients   a reduce-scatter over the shards, then an all-reduce of each shard over context
                ranks and replicas; without sharding, all-reduces of all gradients
    parameters  an all-gather over the shards after the update (ZeRO-1 and 2), or before every
                forward and again before every backward (ZeRO-3)

If states are also sharded over context ranks, these count as shards. Data-parallel traffic that
leaves the host slows down by `Cluster.contention` for each doubling of the number of hosts.
"""

import dataclasses
from typing import Any

import numpy as np

from paceline.accounting.collectives import Numbers
from paceline.accounting.overlap import least_exposed_s
from paceline.core.specs import Experts
from paceline.predict.cost.cluster import Cluster, Span, Tiers, collective_time_s, send_time_s
from paceline.predict.cost.layouts import CHECKPOINTING, SHARDING_STAGES, Layouts, Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommGroups:
    """Mapping of the mesh axes of many layouts to the tiers of a cluster."""

    tensor: Span
    context: Span
    shard: Span
    """Shard ranks, joined with context ranks if states are sharded over them."""
    unsharded_context: Span
    """Context ranks that hold identical states."""
    replicate: Span
    neighbour_stages: Span
    """Two consecutive pipeline stages."""

    @classmethod
    def of(cls, layouts: Layouts, tiers: Tiers) -> "CommGroups":
        """Returns the spans of each axis of every layout."""
        two_stages = np.minimum(layouts.pipeline, 2)
        both = np.asarray(layouts.shards_context) & (layouts.stage > 0)
        beside = layouts.stride("context")
        return cls(
            tensor=tiers.span(layouts.tensor),
            context=tiers.span(layouts.context, beside),
            shard=tiers.span(
                np.where(both, layouts.state_shards, layouts.shard),
                np.where(both, beside, layouts.stride("shard")),
            ),
            unsharded_context=tiers.span(np.where(both, 1, layouts.context), beside),
            replicate=tiers.span(layouts.replicate, layouts.stride("replicate")),
            neighbour_stages=tiers.span(two_stages, layouts.stride("pipeline")),
        )


def tensor_time_s(layouts: Layouts, workload: Workload, spans: CommGroups) -> Any:
    """Returns the seconds of tensor-parallel communication per layer and pass."""
    size = _stream_bytes(layouts, workload)
    together = collective_time_s("all_reduce", spans.tensor, size)
    # A reduce-scatter takes as long as an all-gather of the same size.
    in_halves = 2 * collective_time_s("all_gather", spans.tensor, size)
    per_call = np.where(layouts.sequence_parallel, in_halves, together)
    branches = 2 if workload.shape.has_attention else 1
    return per_call * branches * _passes(layouts)


def context_time_s(layouts: Layouts, workload: Workload, spans: CommGroups) -> Any:
    """Returns the seconds of context-parallel communication per layer and pass."""
    width = 2 * workload.shape.key_value_width / layouts.tensor
    size = workload.compute_bytes * workload.tokens * width
    # One all-gather per forward, recomputation and backward, plus a reduce-scatter of gradients.
    return collective_time_s("all_gather", spans.context, size) * (_passes(layouts) + 1)


def pipeline_time_s(layouts: Layouts, workload: Workload, spans: CommGroups) -> Any:
    """Returns the seconds per pass for a stage's messages, forward and backward."""
    whole = _stream_bytes(layouts, workload)
    sent = send_time_s(spans.neighbour_stages, whole / layouts.tensor)
    gathered = collective_time_s("all_gather", spans.tensor, whole)
    one_way = sent + np.where(layouts.sequence_parallel, 0.0, gathered)
    return np.where(layouts.pipeline > 1, 2 * layouts.pipeline_interleave * one_way, 0.0)


def all_to_all_time_s(layouts: Layouts, workload: Workload, experts: Experts, tiers: Tiers) -> Any:
    """Returns the seconds per layer and pass of the all-to-alls of expert parallelism."""
    ranks = np.asarray(layouts.expert)
    inside = tiers.span(ranks).blocks[0]
    sent = workload.compute_bytes * workload.tokens / layouts.context / layouts.tensor
    sent = sent * workload.shape.d_model * experts.experts_per_token
    inner, outer = tiers.tiers[0], tiers.tiers[-1]
    seconds = sent * ((inside - 1) / inner.bytes_per_s + (ranks - inside) / outer.bytes_per_s)
    latency = (inside - 1) * inner.latency_s + (ranks - inside) * outer.latency_s
    return 2 * _passes(layouts) * (seconds / ranks + latency)


def exposed_all_to_all_s(
    layouts: Layouts, workload: Workload, cluster: Cluster, work_s: Any
) -> Any:
    """Returns the seconds of all-to-alls per layer and pass that no work of the device hides."""
    if workload.experts is None:
        return 0.0
    routed_s = all_to_all_time_s(layouts, workload, workload.experts, cluster.tiers)
    if not np.any(cluster.expert_overlap):
        return routed_s
    # The parts of an interleaved pipeline alternate: one computes while another sends.
    left_s = np.maximum(routed_s - cluster.expert_overlap * work_s, 0.0)
    return np.where(layouts.pipeline_interleave > 1, left_s, routed_s)


def gradient_time_s(
    layouts: Layouts, workload: Workload, spans: CommGroups, num_parameters: Any
) -> Any:
    """Returns the seconds to average all gradients of a device once."""
    size = workload.reduction_bytes * num_parameters / layouts.model_devices
    divided = layouts.stage > 0
    owned = size / np.where(divided, layouts.state_shards, 1)
    over_shards = np.where(
        divided,
        collective_time_s("reduce_scatter", spans.shard, size),
        collective_time_s("all_reduce", spans.shard, size),
    )
    over_context = collective_time_s("all_reduce", spans.unsharded_context, owned)
    return over_shards + over_context + collective_time_s("all_reduce", spans.replicate, owned)


def gather_time_s(
    layouts: Layouts, workload: Workload, spans: CommGroups, num_parameters: Any
) -> Any:
    """Returns the seconds to all-gather a device's parameters once; 0 without sharding.

    ZeRO-1 and 2 gather updated parameters in the parameter dtype. ZeRO-3 gathers in the compute
    dtype.
    """
    element_bytes = np.where(
        layouts.stage == SHARDING_STAGES["parameters"],
        workload.compute_bytes,
        workload.parameter_bytes,
    )
    size = element_bytes * num_parameters / layouts.model_devices
    gathered = collective_time_s("all_gather", spans.shard, size)
    return np.where(layouts.stage > 0, gathered, 0.0)


def exposed_data(
    layouts: Layouts,
    workload: Workload,
    spans: CommGroups,
    pass_s: Any,
    num_parameters: Any,
    hidden: Numbers,
    cluster: Cluster,
) -> Any:
    """Returns the exposed communication of averaging gradients and gathering parameters.

    ZeRO-3 gathers in every forward and every backward. ZeRO-1 and 2 gather once, overlapped with
    the first forward. Averaging overlaps with the backward of the last pass, or of every pass.
    """
    full = layouts.checkpointing == CHECKPOINTING["full"]
    # Backward takes twice as long as forward, or three times with full recomputation.
    forward = np.asarray(hidden) * pass_s * np.where(full, 1 / 4, 1 / 3)
    backward = np.asarray(hidden) * pass_s - forward
    slower = data_slowdown(layouts, cluster)
    gradients = gradient_time_s(layouts, workload, spans, num_parameters) * slower
    gathered = gather_time_s(layouts, workload, spans, num_parameters) * slower
    every_pass = layouts.stage == 3
    passes = np.asarray(workload.num_micro_batches)
    in_backward = np.where(every_pass, gathered, 0.0)
    in_other_backwards = in_backward + (gradients if workload.reduces_every_pass else 0.0)

    def exposed(communication: Any, beside: Any) -> Any:
        never = cluster.exposed_share * communication
        return never + least_exposed_s(communication - never, beside)

    return (
        exposed(gathered, forward) * np.where(every_pass, passes, 1)
        + exposed(in_other_backwards, backward) * (passes - 1)
        + exposed(in_backward + gradients, backward)
    )


def data_slowdown(layouts: Layouts, cluster: Cluster) -> Any:
    """Returns the slowdown factor of data-parallel traffic from sharing the network."""
    inside = cluster.tiers.tiers[0].num_devices
    if not np.any(cluster.contention) or inside is None:
        return 1.0
    devices = layouts.stride("pipeline")
    return 1 + cluster.contention * np.log2(np.maximum(devices / inside, 1))


def engine_block_s(layouts: Layouts, cluster: Cluster) -> Any:
    """Returns the engine's size-independent seconds per block and pass."""
    engine = cluster.engine
    split = np.where(layouts.sequence_parallel, engine.sequence_block_s, engine.tensor_block_s)
    # One all-gather of keys and values, one reduce-scatter of their gradients.
    gathered = np.where(layouts.context > 1, 2 * engine.collective_s, 0.0)
    return engine.block_s + np.where(layouts.tensor > 1, split, 0.0) + gathered


def engine_stages_s(layouts: Layouts, cluster: Cluster) -> Any:
    """Returns the engine's seconds per pass through a rank's stages, beyond its blocks."""
    stages_s = layouts.pipeline_interleave * cluster.engine.stage_s
    return np.where(layouts.pipeline > 1, stages_s, 0.0)


def engine_data_s(layouts: Layouts, workload: Workload, cluster: Cluster) -> Any:
    """Returns the engine's seconds per step to gather parameters and average gradients.

    FSDP2 does both block by block, with the embedding and the output layer as one more unit. It
    frees full parameters after every backward, so that ZeRO-1 and 2 gather in every pass as well.
    """
    passes = np.asarray(workload.num_micro_batches)
    gathers = np.where(layouts.stage == 3, 2, np.where(layouts.stage > 0, 1, 0)) * passes
    averages = 1 + ((layouts.stage > 0) & (layouts.replicate > 1))
    units = workload.shape.num_layers / layouts.pipeline + 1
    has_data = layouts.shard * layouts.replicate * layouts.context > 1
    return np.where(has_data, units * (gathers + averages) * cluster.engine.collective_s, 0.0)


def _stream_bytes(layouts: Layouts, workload: Workload) -> Any:
    """Returns the bytes of the residual stream of one pass, summed over tensor ranks."""
    tokens = workload.tokens / layouts.context
    return workload.compute_bytes * tokens * workload.shape.d_model


def _passes(layouts: Layouts) -> Any:
    return np.where(layouts.checkpointing == CHECKPOINTING["full"], 3, 2)
