"""Predicted time of a data-parallel step on a calibrated machine, by term.

Forward and backward come from `paceline.prediction.compute`. For P parameters on n ranks, a
strategy adds:

    optimizer     P, or P/n if the optimizer state is sharded, times the update of one parameter
    bucket copy   copies of the gradients into and out of buckets
    exposed       communication that compute waits for. naive and flat expose every collective;
                  the others expose what remains after backward. sharded_optimizer all-gathers all
                  parameters after its step. sharded all-gathers bucket by bucket, and the next
                  forward waits only for the buckets that it needs
    contention    compute time lost to collectives in flight, proportional to their bytes and at
                  most the time to wait for them. The collectives slow down as well

The last two come from `paceline.accounting.communication.overlap_simulator`.
"""

import dataclasses
from collections.abc import Sequence

from paceline.accounting.communication.overlap_simulator import (
    ComputeSegment,
    OverlapResult,
    Transfer,
    simulate_overlap,
)
from paceline.core.collectives import Operation
from paceline.core.errors import UsageError
from paceline.core.specs import BatchShape, ModelShape
from paceline.core.strategies import SHARDED_STATE, StrategyName
from paceline.prediction.calibration import Calibration
from paceline.prediction.collectives import GradientCollective, gradient_collectives
from paceline.prediction.compute import ComputeTime, compute_time

PREDICTED: tuple[StrategyName, ...] = (
    *("none", "naive", "flat", "overlapped", "bucketed", "torch_ddp"),
    *("sharded_optimizer", "sharded"),
)
"""Strategies whose step time can be predicted."""

# Elements read and written per gradient element: one copy into the bucket, one copy of the average
# out of it. torch averages during the copy into the bucket.
_PASSES = 4
_TORCH_PASSES = 2
_AFTER_BACKWARD: tuple[StrategyName, ...] = ("naive", "flat")
_GATHER: Operation = "gather_from_owners"
_FLOAT32_BYTES = 4


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
        if strategy == "sharded_optimizer":
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
