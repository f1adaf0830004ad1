"""Predicted time of a step on a calibrated machine, by term: of a strategy, or of a layout.

`strategy_step_terms` simulates the buckets of a data-parallel strategy. Forward and backward are
predicted segment by segment. For P parameters on n ranks, a strategy adds:

    optimizer     P, or P/n if the optimizer state is sharded, times the update of one parameter
    bucket copy   copies of the gradients into and out of buckets
    exposed       communication that compute waits for. naive and flat expose every collective;
                  the others expose what remains after backward. zero1 all-gathers all
                  parameters after its step. zero2 all-gathers bucket by bucket, and the next
                  forward waits only for the buckets that it needs
    contention    compute time lost to collectives in flight, proportional to their bytes and at
                  most the time to wait for them. The collectives slow down as well

The last two come from `paceline.accounting.overlap`.

`layout_step_time` predicts what runs on torch's engine instead, tensor, context and pipeline
parallelism and FSDP2, with the closed formulas of `paceline.predict.cost.step_time`. Computing is
timed in float32, as it was calibrated.

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
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.accounting.buckets import aligned, cut_unit, divide_as_torch, divide_into_buckets
from paceline.accounting.counts import ModelSegment, model_segments
from paceline.accounting.overlap import ComputeSegment, OverlapResult, Transfer, simulate_overlap
from paceline.core.errors import UsageError
from paceline.core.plan import ParallelLayout
from paceline.core.specs import BatchShape, ModelShape, Precision
from paceline.core.strategies import (
    BUCKET_STRATEGIES,
    DEFAULT_BUCKET_SIZE_MB,
    SHARDED_STATE,
    Operation,
    StrategyName,
)
from paceline.core.units import MIB
from paceline.predict.calibration import Calibration, attention_work, linear_work, nearest_times
from paceline.predict.cost.cluster import NO_ENGINE, Cluster, Engine, Tier, Tiers
from paceline.predict.cost.layouts import Layouts, Workload
from paceline.predict.cost.memory_traffic import elementwise_bytes, loss_bytes, num_kernels
from paceline.predict.cost.step_time import StepTime, flops_per_pass, step_time


class SegmentTime(NamedTuple):
    """Seconds of one segment's forward or backward pass, by term."""

    matmul_s: float
    attention_s: float
    elementwise_s: float
    launch_s: float
    """Cost of launching operators, independent of their size."""

    @property
    def total_s(self) -> float:
        """Sum of all terms."""
        return sum(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeTime:
    """Forward and backward times of every segment, in forward order."""

    segments: tuple[ModelSegment, ...]
    forward: tuple[SegmentTime, ...]
    backward: tuple[SegmentTime, ...]

    @property
    def forward_s(self) -> float:
        """Seconds of the forward pass."""
        return sum(time.total_s for time in self.forward)

    @property
    def backward_s(self) -> float:
        """Seconds of the backward pass."""
        return sum(time.total_s for time in self.backward)

    def terms(self) -> dict[str, float]:
        """Returns the sum of each `SegmentTime` field over all segments and both directions."""
        by_term = zip(*self.forward, *self.backward, strict=True)
        return dict(zip(SegmentTime._fields, map(sum, by_term), strict=True))

    def completed_after(self) -> list[int]:
        """Returns, per parameter, the number of backward segments that complete its gradient."""
        completed: list[int] = []
        for number, segment in enumerate(reversed(self.segments), start=1):
            completed += [number] * len(segment.parameter_sizes)
        return completed[::-1]


def compute_time(shape: ModelShape, batch: BatchShape, calibration: Calibration) -> ComputeTime:
    """Returns the time of one forward and backward pass."""
    segments = model_segments(shape)
    times = [_segment_times(segment, shape, batch, calibration) for segment in segments]
    forward, backward = zip(*times, strict=True)
    return ComputeTime(segments=segments, forward=forward, backward=backward)


def _segment_times(
    segment: ModelSegment, shape: ModelShape, batch: BatchShape, calibration: Calibration
) -> tuple[SegmentTime, SegmentTime]:
    tokens = batch.tokens_per_pass
    matmul_s = [0.0, 0.0]
    for linear in segment.linears:
        dimensions: tuple[int, ...] = (tokens, linear.inputs, linear.outputs)
        times = nearest_times(calibration.linears, dimensions, linear_work)
        matmul_s = [total + time for total, time in zip(matmul_s, times, strict=True)]
    attention_s = (0.0, 0.0)
    if segment.has_attention:
        dimensions = (
            batch.num_sequences,
            batch.context_length,
            shape.num_heads,
            shape.key_value_heads,
            shape.head_width,
        )
        attention_s = nearest_times(calibration.attentions, dimensions, attention_work)
    elements = [tokens * number for number in segment.elements]
    elements[1] += segment.backward_fixed_elements
    one_launch_s = (calibration.forward_launch_s, calibration.backward_launch_s)
    directions = []
    for direction in (0, 1):
        device_s = (
            matmul_s[direction],
            attention_s[direction],
            elements[direction] * calibration.elementwise_s_per_element,
        )
        launch_s = segment.launches[direction] * one_launch_s[direction]
        if calibration.topology["device"] != "cpu":
            # A GPU runs asynchronously and hides launches while it has queued work.
            launch_s = max(0.0, launch_s - sum(device_s))
        directions.append(SegmentTime(*device_s, launch_s))
    return directions[0], directions[1]


_FLOAT32_BYTES = 4
_PER_PARAMETER: tuple[StrategyName, ...] = ("naive", "overlapped")


class GradientCollective(NamedTuple):
    """One collective of a step."""

    operation: Operation
    num_bytes: int
    parameters: Sequence[int]
    """Indices of the parameters whose gradients it holds; empty for a message of flags only."""


def gradient_collectives(
    strategy: StrategyName,
    parameter_sizes: Sequence[int],
    world_size: int,
    bucket_size_mb: float | None = None,
) -> list[GradientCollective]:
    """Returns the collectives of a float32 step in launch order.

    `parameter_sizes` are element counts in the model's order. `bucket_size_mb` is the bucket size
    limit in MiB; None selects the strategy's default.
    """
    if bucket_size_mb is not None and strategy not in BUCKET_STRATEGIES:
        raise UsageError(f"strategy {strategy!r} has no buckets, so no bucket size applies to it")
    cap_bytes = None if bucket_size_mb is None else bucket_size_mb * MIB
    indices = range(len(parameter_sizes) - 1, -1, -1)
    if strategy == "torch_ddp":
        num_bytes = [_FLOAT32_BYTES * size for size in parameter_sizes]
        return [
            GradientCollective("all_reduce", sum(num_bytes[index] for index in group), group)
            for group in divide_as_torch(indices, num_bytes[::-1], cap_bytes)
        ]
    filled = [aligned(size, _FLOAT32_BYTES) for size in parameter_sizes]
    if strategy in _PER_PARAMETER:
        cap_bytes = 0.0
    elif strategy != "flat" and cap_bytes is None:
        cap_bytes = DEFAULT_BUCKET_SIZE_MB * MIB
    num_bytes = [_FLOAT32_BYTES * size for size in filled]
    groups = divide_into_buckets(indices, num_bytes[::-1], cap_bytes)
    messages = []
    for group in groups:
        if strategy == "zero2":
            # Buckets are padded to equal shards.
            unit = [parameter_sizes[index] for index in group]
            padded = world_size * cut_unit(unit, world_size, _FLOAT32_BYTES).share
            messages.append(GradientCollective("reduce_to_owners", _FLOAT32_BYTES * padded, group))
        else:
            # After the gradients, one flag per parameter says whether this rank has a gradient.
            size = sum(num_bytes[index] for index in group) + _FLOAT32_BYTES * len(group)
            messages.append(GradientCollective("all_reduce", size, group))
    if strategy == "zero2":
        # One flag per parameter: whether any rank has its gradient.
        messages.append(GradientCollective("all_reduce", _FLOAT32_BYTES * len(parameter_sizes), ()))
    return messages


PREDICTED: tuple[StrategyName, ...] = (
    *("none", "naive", "flat", "overlapped", "ddp", "torch_ddp"),
    *("zero1", "zero2"),
)
"""Strategies whose step time can be predicted."""

# Elements read and written per gradient element: one copy into the bucket, one copy of the average
# out of it. torch averages during the copy into the bucket.
_PASSES = 4
_TORCH_PASSES = 2
_AFTER_BACKWARD: tuple[StrategyName, ...] = ("naive", "flat")
_GATHER: Operation = "gather_from_owners"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTerms:
    """Seconds of a step by term."""

    matmul_s: float
    attention_s: float
    elementwise_s: float
    launch_s: float
    bucket_copy_s: float
    optimizer_s: float
    contention_s: float
    exposed_s: float

    @property
    def total_s(self) -> float:
        """The whole step."""
        return float(sum(dataclasses.astuple(self)))


def strategy_step_terms(
    shape: ModelShape,
    batch: BatchShape,
    strategy: StrategyName,
    calibration: Calibration,
    bucket_size_mb: float | None = None,
) -> StepTerms:
    """Returns the predicted terms of a float32 step on the calibrated ranks."""
    if strategy not in PREDICTED:
        raise UsageError(
            f"the time of {strategy!r} is not predicted yet; predicted: {', '.join(PREDICTED)}"
        )
    computing = compute_time(shape, batch, calibration)
    sizes = [size for segment in computing.segments for size in segment.parameter_sizes]
    world_size = calibration.world_size
    shards_state = strategy in SHARDED_STATE and world_size > 1
    bucket_copy_s = lost_s = exposed_s = 0.0
    optimizer_s = sum(sizes) * calibration.optimizer_s_per_parameter
    optimizer_s /= world_size if shards_state else 1
    if strategy != "none" and world_size > 1:
        passes = _TORCH_PASSES if strategy == "torch_ddp" else _PASSES
        bucket_copy_s = passes * sum(sizes) * calibration.copy_s_per_element
        collectives = gradient_collectives(strategy, sizes, world_size, bucket_size_mb)
        simulated = [_gradients(strategy, collectives, computing, bucket_copy_s, calibration)]
        if strategy == "zero1":
            exposed_s = calibration.collective(_GATHER).time_s(_FLOAT32_BYTES * sum(sizes))
        elif shards_state:
            simulated.append(_parameters(collectives, computing, optimizer_s, calibration))
        lost_s = sum(lanes.lost_s for lanes in simulated)
        exposed_s += sum(lanes.exposed_s for lanes in simulated)
    return StepTerms(
        **computing.terms(),
        bucket_copy_s=bucket_copy_s,
        optimizer_s=optimizer_s,
        contention_s=lost_s,
        exposed_s=exposed_s,
    )


def _gradients(
    strategy: StrategyName,
    collectives: Sequence[GradientCollective],
    computing: ComputeTime,
    bucket_copy_s: float,
    calibration: Calibration,
) -> OverlapResult:
    """Simulates backward with collectives that start once their last gradient is ready."""
    stretch = 1 + bucket_copy_s / computing.backward_s
    work = [ComputeSegment(seconds=time.total_s * stretch) for time in reversed(computing.backward)]
    completed = computing.completed_after()
    transfers = []
    for collective in collectives:
        after = len(work)
        if strategy not in _AFTER_BACKWARD and collective.parameters:
            after = max(completed[index] for index in collective.parameters)
        transfers.append(_transfer(collective.operation, collective.num_bytes, after, calibration))
    return simulate_overlap(work, transfers)


def _parameters(
    collectives: Sequence[GradientCollective],
    computing: ComputeTime,
    optimizer_s: float,
    calibration: Calibration,
) -> OverlapResult:
    """Simulates updating and all-gathering buckets one by one, overlapped with forward."""
    buckets = [collective for collective in reversed(collectives) if collective.parameters]
    num_bytes = sum(bucket.num_bytes for bucket in buckets)
    work, transfers = [], []
    arrival: dict[int, int] = {}
    for number, bucket in enumerate(buckets, start=1):
        work.append(ComputeSegment(seconds=optimizer_s * bucket.num_bytes / num_bytes))
        transfers.append(_transfer(_GATHER, bucket.num_bytes, number, calibration))
        arrival |= dict.fromkeys(bucket.parameters, number)
    index = needs = 0
    for segment, time in zip(computing.segments, computing.forward, strict=True):
        for _ in segment.parameter_sizes:
            needs = max(needs, arrival[index])
            index += 1
        work.append(ComputeSegment(seconds=time.total_s, needs=needs))
    return simulate_overlap(work, transfers, wait_for_all=False)


def _transfer(
    operation: Operation, num_bytes: int, after: int, calibration: Calibration
) -> Transfer:
    return Transfer(
        seconds=calibration.collective(operation).time_s(num_bytes),
        num_bytes=num_bytes,
        after=after,
        contention=calibration.contention(operation),
    )


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
