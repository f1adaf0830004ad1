"""Measures the parts of a training step on this machine and turns them into records.

Phases: all ranks time their compute together, one part after the other, in rounds, so that a
temporary slowdown of the machine affects all parts; then the overhead of torch's engine per block;
then collectives by size, with a fit; then the contention between compute and communication. With
one rank, only the first phase runs.

Contention is measured in three parts: matmuls; then messages, one after the other; then messages
again, with matmuls running until each has arrived. The compute time lost is the duration of the
third part minus the time that its matmuls take in the first. The slowdown of messages is the
duration of the third part over that of the second.
"""

import dataclasses
import random
import time
from collections.abc import Callable, Iterator

import msgspec
import torch
import torch.distributed as dist

from paceline.benchmarks.collectives import CollectiveTimes, fit_records, measure_collective
from paceline.benchmarks.compute_probes import (
    ComputeShapes,
    Probe,
    compute_shapes,
    engine_probes,
    make_probes,
)
from paceline.benchmarks.config import (
    CALIBRATED_OPERATIONS,
    CalibrationSweep,
    CollectiveCase,
    CollectiveSweep,
)
from paceline.benchmarks.harness.measure import measured
from paceline.benchmarks.harness.ranks import MeasuringRanks, sweep_ranks
from paceline.core.strategies import Operation
from paceline.core.units import KIB, MIB, Progress
from paceline.devices.accelerator import synchronize_stream
from paceline.kernels import resolve_implementation
from paceline.parallel.ranks.collectives import (
    mean_over_ranks,
    reduce_numbers,
    resolve_group,
    start_all_gather,
    start_reduce_scatter,
)
from paceline.parallel.ranks.pending import Pending
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


_MOST_MESSAGES = 300
# Few and long: after a pause, ranks may share a core for a tenth of a second before the scheduler
# separates them.
_CONTENTION_REPETITIONS = 4
# A matmul takes a quarter of a millisecond on a core. It must be short: an arrival is noticed only
# when a matmul is over, and the delay counts as slowdown.
_MATMUL_WIDTH = 256
_MATMULS = 400


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContentionTimes:
    """Results of one operation, identical on all ranks."""

    size_bytes: int
    lost_s_per_byte: list[float]
    """Compute seconds lost per byte sent at the same time, one value per repetition."""
    slowdown: list[float]
    """Time of messages with concurrent matmuls over their time without, per repetition."""


class _Together:
    """Matmuls and messages of one rank."""

    def __init__(self, operation: Operation, device: torch.device) -> None:
        self._device = device
        self._group = resolve_group(None)
        world_size = dist.get_world_size()
        num_elements = _CONTENTION_SIZE // 4 // world_size * world_size
        self.message = torch.zeros(num_elements, device=device)
        borders = range(0, num_elements + 1, num_elements // world_size)
        starts: dict[Operation, Callable[[], Pending]] = {
            "all_reduce": self._start_all_reduce,
            "reduce_to_owners": lambda: start_reduce_scatter(self.message, self._group),
            "gather_from_owners": lambda: start_all_gather(self.message, borders, self._group),
        }
        self._start = starts[operation]
        self._factors = torch.randn(2, _MATMUL_WIDTH, _MATMUL_WIDTH, device=device)

    def _start_all_reduce(self) -> Pending:
        work = dist.all_reduce(self.message, group=self._group, async_op=True)
        return Pending("all-reduce", self.message.nbytes, [work], self._device)

    def _multiply(self) -> None:
        torch.mm(self._factors[0], self._factors[1])
        self._wait_for_matmuls()

    def _wait_for_matmuls(self) -> None:
        """Waits only for the current stream: a device-wide wait would include messages."""
        synchronize_stream(self._device)

    def matmul_s(self) -> float:
        """Returns the seconds of one matmul, with no message in flight."""
        began = time.perf_counter()
        for _ in range(_MATMULS):
            self._multiply()
        return (time.perf_counter() - began) / _MATMULS

    def messages_s(self, num_messages: int) -> float:
        """Returns the seconds of `num_messages` messages, one after the other."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(num_messages):
            self._start().wait()
            # On a GPU, wait() only blocks the stream.
            self._wait_for_matmuls()
        return time.perf_counter() - began

    def together_s(self, num_messages: int) -> tuple[float, int]:
        """Returns the seconds of messages with concurrent matmuls, and the number of matmuls."""
        dist.barrier()
        num_matmuls = 0
        began = time.perf_counter()
        for _ in range(num_messages):
            pending = self._start()
            while not pending.is_completed():
                self._multiply()
                num_matmuls += 1
            pending.wait()
            self._wait_for_matmuls()
        return time.perf_counter() - began, num_matmuls


def measure_contention(
    device: torch.device, operation: Operation, undisturbed: CollectiveTimes, time_limit_s: float
) -> ContentionTimes:
    """Measures one operation, with all phases in the time limit; all ranks call it together.

    The number of messages is derived from `undisturbed`, the times of messages of a similar size
    without concurrent compute.
    """
    together = _Together(operation, device)
    expected_s = sorted(undisturbed.samples)[len(undisturbed.samples) // 2]
    expected_s *= together.message.nbytes / undisturbed.size_bytes
    num_messages = int(time_limit_s / _CONTENTION_REPETITIONS / 2 / expected_s)
    num_messages = max(1, min(num_messages, _MOST_MESSAGES))
    sent = num_messages * together.message.nbytes
    together.matmul_s()
    together.together_s(1)
    lost, slower = [], []
    for _ in range(_CONTENTION_REPETITIONS):
        before_s = together.matmul_s()
        messages_s = together.messages_s(num_messages)
        both_s, num_matmuls = together.together_s(num_messages)
        one_matmul_s = (before_s + together.matmul_s()) / 2
        lost.append(max(0.0, both_s - num_matmuls * one_matmul_s) / sent)
        slower.append(both_s / messages_s)
    return ContentionTimes(
        size_bytes=together.message.nbytes,
        lost_s_per_byte=mean_over_ranks(lost, device),
        slowdown=mean_over_ranks(slower, device),
    )
