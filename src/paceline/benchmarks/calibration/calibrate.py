"""Measures the parts of a training step on this machine and turns them into records.

Phases: all ranks time their compute together, one part after the other, in rounds, so that a
temporary slowdown of the machine affects all parts; then the overhead of torch's engine per block;
then collectives by size, with a fit; then the contention between compute and communication. With
one rank, only the first phase runs.
"""

import random
import time
from collections.abc import Iterator

import msgspec
import torch
import torch.distributed as dist

from paceline.benchmarks.calibration.compute import (
    ComputeShapes,
    Probe,
    compute_shapes,
    engine_probes,
    make_probes,
)
from paceline.benchmarks.calibration.contention import ContentionTimes, measure_contention
from paceline.benchmarks.collectives import CollectiveTimes, fit_records, measure_collective
from paceline.benchmarks.config import (
    CALIBRATED_OPERATIONS,
    CalibrationSweep,
    CollectiveCase,
    CollectiveSweep,
)
from paceline.benchmarks.harness.ranks import MeasuringRanks, sweep_ranks
from paceline.benchmarks.harness.records import measured
from paceline.core.strategies import Operation
from paceline.core.units import KIB, MIB, Progress
from paceline.kernels import resolve_implementation
from paceline.parallel.ranks.collectives import mean_over_ranks, reduce_numbers
from paceline.records import CaseValue, Record

# Shares of the time limit.
_COMPUTE_SHARE = 0.4
_ENGINE_SHARE = 0.1
_COLLECTIVES_SHARE = 0.25
_CONTENTION_SHARE = 0.25
_LEAST_ROUNDS = 5
_SAMPLE_S = 0.02
_MOST_REPETITIONS = 10

_SIZES = tuple(4 * KIB * 4**power for power in range(8))
_CONTENTION_SIZE = 4 * MIB
_FEWEST_SIZES = 3
_PASSES = 3
_REPETITIONS = 40
_GRACE_S = 120.0

Samples = dict[str, dict[str, list[float]]]


def calibration_records(sweep: CalibrationSweep, on_progress: Progress) -> Iterator[Record]:
    """Measures all parts on a group of ranks; yields records on rank 0 only."""
    for ranks in sweep_ranks(sweep, grace_s=sweep.time_limit_s + _GRACE_S):
        yield from ranks.on_first(_records_of(sweep, ranks, on_progress))


def _records_of(
    sweep: CalibrationSweep, ranks: MeasuringRanks, on_progress: Progress
) -> Iterator[Record]:
    num_stages = 1 + (1 + 2 * len(CALIBRATED_OPERATIONS)) * (ranks.world_size > 1)
    shapes = compute_shapes(sweep.batches())
    samples: Samples = ranks.run(measure_computing, shapes, _COMPUTE_SHARE * sweep.time_limit_s)
    topology: dict[str, CaseValue] = {**ranks.topology, "dtype": "float32"}
    yield from _compute_records(shapes, samples, topology)
    on_progress(1, num_stages)
    if ranks.world_size == 1:
        return
    ranks_per_host = ranks.world_size // int(str(topology["num_hosts"]))
    blocks: Samples = ranks.run(measure_engine, ranks_per_host, _ENGINE_SHARE * sweep.time_limit_s)
    for engine, laps in blocks.items():
        yield measured("calibration", {"quantity": "engine", **topology, "engine": engine}, laps)
    on_progress(2, num_stages)
    per_operation_s = sweep.time_limit_s / len(CALIBRATED_OPERATIONS)
    for index, operation in enumerate(CALIBRATED_OPERATIONS):
        by_size: dict[int, list[float]] = ranks.run(
            measure_sizes, operation, _COLLECTIVES_SHARE * per_operation_s
        )
        for fit in fit_records(operation, by_size, topology):
            case = {"quantity": "collective", **fit.case}
            yield msgspec.structs.replace(fit, kind="calibration", case=case)
        on_progress(3 + 2 * index, num_stages)
        nearest = min(by_size, key=lambda size: abs(size - _CONTENTION_SIZE))
        times: ContentionTimes = ranks.run(
            measure_contention,
            operation,
            CollectiveTimes(size_bytes=nearest, samples=by_size[nearest]),
            _CONTENTION_SHARE * per_operation_s,
        )
        fields = {**topology, "operation": operation, "size_bytes": times.size_bytes}
        yield measured(
            "calibration",
            {"quantity": "contention", **fields},
            {"lost_s_per_byte": times.lost_s_per_byte, "slowdown": times.slowdown},
        )
        on_progress(4 + 2 * index, num_stages)


def measure_computing(device: torch.device, shapes: ComputeShapes, time_limit_s: float) -> Samples:
    """Times the compute parts of a step; all ranks call it together."""
    return _time_probes(make_probes(shapes, device), device, time_limit_s)


def measure_engine(device: torch.device, ranks_per_host: int, time_limit_s: float) -> Samples:
    """Times a narrow block under every layout; all ranks call it together."""
    return _time_probes(list(engine_probes(device, ranks_per_host)), device, time_limit_s)


def _time_probes(probes: list[Probe], device: torch.device, time_limit_s: float) -> Samples:
    """Runs all probes in rounds until the time limit."""
    samples: Samples = {probe.name: {} for probe in probes}
    for probe in probes:
        probe.run(1)
    repetitions = [_agree_on_repetitions(probe, device) for probe in probes]
    began = time.perf_counter()
    num_rounds = 0
    elapsed_s = 0.0
    while num_rounds < _LEAST_ROUNDS or elapsed_s < time_limit_s:
        order = random.Random(num_rounds).sample(range(len(probes)), len(probes))
        dist.barrier()
        for index in order:
            for name, seconds in probes[index].run(repetitions[index]).items():
                samples[probes[index].name].setdefault(name, []).append(seconds)
        num_rounds += 1
        # The same on all ranks, so that all stop after the same round.
        (elapsed_s,) = reduce_numbers([time.perf_counter() - began], dist.ReduceOp.MAX, device)
    return {
        name: {lap: mean_over_ranks(values, device) for lap, values in laps.items()}
        for name, laps in samples.items()
    }


def _agree_on_repetitions(probe: Probe, device: torch.device) -> int:
    """Returns the number of runs of a probe per sample, so that a sample is not too short."""
    began = time.perf_counter()
    probe.run(1)
    (seconds,) = reduce_numbers([time.perf_counter() - began], dist.ReduceOp.MAX, device)
    return max(1, min(_MOST_REPETITIONS, round(_SAMPLE_S / seconds)))


def measure_sizes(
    device: torch.device, operation: Operation, time_limit_s: float
) -> dict[int, list[float]]:
    """Times an operation by size, up to the first that takes too long; all ranks call it.

    Passes over the sizes are repeated, because gloo's calls are sometimes slow for a while.
    """
    samples: dict[int, list[float]] = {}
    sizes = list(_SIZES)
    per_size_s = time_limit_s / len(sizes) / _PASSES
    # The largest size may use the time that small sizes leave over.
    sweep = CollectiveSweep(warmup=1, steps=_REPETITIONS, time_limit_s=2 * per_size_s)
    for _ in range(_PASSES):
        for size in sizes:
            times = measure_collective(device, CollectiveCase(sweep, operation, size))
            samples.setdefault(times.size_bytes, []).extend(times.samples)
            # A line needs more than two points.
            if min(times.samples) > per_size_s and len(samples) >= _FEWEST_SIZES:
                sizes = sizes[: sizes.index(size) + 1]
                break
    return samples


def _compute_records(
    shapes: ComputeShapes, samples: Samples, topology: dict[str, CaseValue]
) -> Iterator[Record]:
    implementation = resolve_implementation("auto", str(topology["device"]))
    parts: list[tuple[str, dict[str, CaseValue]]] = [
        *(("linear", shape._asdict()) for shape in shapes.linears),
        *(
            ("attention", {**shape._asdict(), "attention": implementation})
            for shape in shapes.attentions
        ),
        *((name, {}) for name in ("stream", "copy", "call", "optimizer")),
    ]
    precision = torch.get_float32_matmul_precision()
    for (quantity, fields), laps in zip(parts, samples.values(), strict=True):
        case = {"quantity": quantity, **topology, **fields}
        yield measured("calibration", {**case, "float32_matmul_precision": precision}, laps)
