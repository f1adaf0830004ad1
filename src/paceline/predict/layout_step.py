"""Time of a step of Paceline's trainer under a layout, on calibrated ranks.

`paceline.predict.step` simulates the buckets of a data-parallel strategy. This module predicts
what runs on torch's engine instead, tensor, context and pipeline parallelism and FSDP2, with the
closed formulas of `paceline.predict.cost.step_time`. Computing is timed in float32, as it was
calibrated.

A calibration predicts one rank's pass segment by segment. `cluster_of_ranks` converts its seconds
to rates with which the formulas reproduce those seconds for the same pass on one rank:

    matmuls       FLOPs of the matrices over the seconds of all linear layers
    attention     FLOPs of attention over its seconds
    memory        bytes of elementwise kernels, as the formulas count them, over their seconds
    launches      seconds of all launches over the formulas' number of kernels
    optimizer     bytes of an update, as the formulas count them, over the seconds of fused AdamW
    engine        seconds of a narrow block under each layout minus those on one rank; on one rank,
                  minus its launches. FSDP2's share is split evenly over its three collectives

The formulas model the effect of a layout on these rates. Links come from the last segment of the
all-reduce fit, interpreted as a ring of p ranks: latency / 2(p - 1) per hop, 2(p - 1) / p of the
bandwidth. Ranks on several hosts have two tiers if one host was also calibrated separately.
"""

import dataclasses

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.plan import ParallelLayout
from paceline.core.specs import BatchShape, ModelShape, Precision
from paceline.predict.calibration import Calibration
from paceline.predict.cost.cluster import NO_ENGINE, Cluster, Engine, Tier, Tiers
from paceline.predict.cost.layouts import Layouts, Workload
from paceline.predict.cost.memory_traffic import elementwise_bytes, loss_bytes, num_kernels
from paceline.predict.cost.step_time import StepTime, flops_per_pass, step_time
from paceline.predict.step import compute_time

_COLLECTIVES_OF_A_SHARD = 3


def layout_step_time(
    layout: ParallelLayout,
    shape: ModelShape,
    batch: BatchShape,
    calibration: Calibration,
    inside: Calibration | None = None,
) -> StepTime:
    """Returns the terms of a step, as arrays of one number."""
    workload = Workload(
        shape=shape,
        precision=Precision(),
        context_length=batch.context_length,
        micro_batch=batch.num_sequences,
        num_micro_batches=batch.accumulation_steps,
    )
    # FSDP2 shards over the context-parallel ranks too.
    arrays = dataclasses.replace(Layouts.of([layout]), shards_context=True)
    # On a CPU, FSDP2's collectives block until the data has arrived: nothing is overlapped.
    hidden = 0.0 if calibration.topology["device"] == "cpu" else 1.0
    return step_time(
        arrays, workload, cluster_of_ranks(calibration, workload, inside), hidden=hidden
    )


def cluster_of_ranks(
    calibration: Calibration, workload: Workload, inside: Calibration | None = None
) -> Cluster:
    """Returns the cluster that reproduces calibrated ranks on the passes of a workload."""
    shape = workload.shape
    batch = BatchShape(
        num_sequences=int(np.asarray(workload.micro_batch)), context_length=workload.context_length
    )
    seconds = compute_time(shape, batch, calibration).terms()
    one_rank = Layouts.of([ParallelLayout()])
    flops = flops_per_pass(one_rank, workload)
    matrices = shape.num_layers * flops.layer_matrices + flops.head
    moved = shape.num_layers * elementwise_bytes(one_rank, workload)
    moved = workload.tokens * (moved + loss_bytes(one_rank, workload))
    kernels = shape.num_layers * num_kernels(one_rank, workload)
    hosts = () if inside is None else (_links(inside, "host"),)
    return Cluster(
        flops_per_s=_first(matrices / seconds["matmul_s"]),
        attention_flops_per_s=_first(
            shape.num_layers * flops.layer_attention / seconds["attention_s"]
        ),
        memory_bytes_per_s=_first(moved / seconds["elementwise_s"]),
        launch_s=_first(seconds["launch_s"] / kernels),
        update_bytes_per_s=workload.update_bytes / calibration.optimizer_s_per_parameter,
        engine=_engine(calibration, seconds["launch_s"] / shape.num_layers),
        oversubscription=calibration.oversubscription,
        tiers=Tiers((*hosts, _links(calibration, None))),
    )


def _engine(calibration: Calibration, launches_s: float) -> Engine:
    """Returns the engine's overhead beyond the launches of a block's pass."""
    timed = calibration.engine
    # A GPU runs asynchronously and hides the engine's calls as long as it has queued work.
    if calibration.topology["device"] != "cpu" or "plain" not in timed:
        return NO_ENGINE
    plain = timed["plain"]

    def beyond(name: str) -> float:
        return max(0.0, timed.get(name, plain) - plain)

    return Engine(
        block_s=max(0.0, plain - launches_s),
        tensor_block_s=beyond("tensor"),
        sequence_block_s=beyond("sequence"),
        collective_s=beyond("shard") / _COLLECTIVES_OF_A_SHARD,
        stage_s=beyond("pipeline"),
    )


def _links(calibration: Calibration, domain: str | None) -> Tier:
    """Returns the tier of the calibrated ranks: a domain of that size, or the outermost tier."""
    ranks = calibration.world_size
    if ranks == 1:
        raise UsageError(
            "the calibration is of one rank, which has no links; calibrate on several ranks"
        )
    last = calibration.collective("all_reduce").segments[-1]
    if last.bytes_per_s is None:
        raise UsageError("the calibration has no bandwidth: calibrate with larger messages")
    return Tier(
        name=domain or "everything",
        num_devices=None if domain is None else ranks,
        latency_s=max(0.0, last.latency_s.value) / (2 * (ranks - 1)),
        bytes_per_s=2 * (ranks - 1) / ranks * last.bytes_per_s.value,
    )


def _first(value: object) -> float:
    return float(np.ravel(np.asarray(value))[0])
