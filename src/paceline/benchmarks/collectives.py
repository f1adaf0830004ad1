"""Times collectives on every rank, and fits their latency and bandwidth.

Phases of one case: allocate; run once and check every element of the result; warm up, which also
determines how many repetitions the time limit allows; repeat; exchange the times once, and take the
slowest rank's for each repetition. Collectives in which all ranks wait for each other are repeated
back to back, as in nccl-tests. Before a broadcast or a reduce, whose root may run ahead, the ranks
synchronize in an untimed barrier.
"""

import collections
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.accounting.collectives import bus_factor, find_warnings, fit_collective
from paceline.benchmarks.config import CollectiveCase, CollectiveSweep
from paceline.benchmarks.harness.measure import Numbers, measured
from paceline.benchmarks.harness.ranks import MeasuringRanks, measuring_ranks
from paceline.core.errors import PacelineError
from paceline.core.strategies import Operation
from paceline.core.units import MIB, Progress
from paceline.devices.accelerator import device_type_of_backend, nth_device, synchronize
from paceline.parallel.ranks.collectives import (
    all_gather_single,
    reduce_numbers,
    reduce_scatter_single,
    resolve_group,
    start_all_gather,
    start_reduce_scatter,
)
from paceline.parallel.ranks.pending import collective_error
from paceline.records import CaseValue, Metric, Record
from paceline.records.links import find_link

_ELEMENT_BYTES = 4
_ROOT = 0
_ROOTED: tuple[Operation, ...] = ("broadcast", "reduce")
_MINIMUM_REPETITIONS = 3


class Collective:
    """One operation with its own buffers.

    Sizes are counted as in nccl-tests: the whole result of an all-gather, the whole input of a
    reduce-scatter, one rank's buffer otherwise.
    """

    def __init__(self, operation: Operation, size_bytes: int, device: torch.device) -> None:
        self.operation = operation
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._group = resolve_group(None)
        # A whole number of elements for each rank, so that no operation has a remainder.
        self.num_elements = (
            max(1, size_bytes // _ELEMENT_BYTES // self.world_size) * self.world_size
        )
        self.size_bytes = self.num_elements * _ELEMENT_BYTES
        self._chunk = self.num_elements // self.world_size
        takes_chunk = operation in ("all_gather", "gather_from_owners")
        gives_chunk = operation in ("reduce_scatter", "reduce_to_owners")
        self.input = torch.empty(self._chunk if takes_chunk else self.num_elements, device=device)
        self.output = self.input
        if operation not in ("all_reduce", "broadcast", "reduce"):  # Those work in place.
            size = self._chunk if gives_chunk else self.num_elements
            self.output = torch.empty(size, device=device)
        if operation == "gather_from_owners":  # Works in place.
            self.input = self.output[self.rank * self._chunk :][: self._chunk]
        calls: dict[Operation, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(self.input),
            "all_gather": lambda: all_gather_single(self.output, self.input),
            "reduce_scatter": lambda: reduce_scatter_single(self.output, self.input),
            "broadcast": lambda: dist.broadcast(self.input, _ROOT),
            "reduce": lambda: dist.reduce(self.input, _ROOT),
            "all_to_all": lambda: dist.all_to_all_single(self.output, self.input),
            "reduce_to_owners": self._reduce_to_owners,
            "gather_from_owners": self._gather_from_owners,
        }
        self._call = calls[operation]

    def run(self) -> None:
        """Runs the operation; an error names rank, operation and size."""
        try:
            self._call()
        except RuntimeError as error:
            raise collective_error(self.operation, self.size_bytes, error) from error

    def _reduce_to_owners(self) -> None:
        reduction = start_reduce_scatter(self.input, self._group)
        reduction.wait()
        reduction.add_to(self.output, overwrite=True)

    def _gather_from_owners(self) -> None:
        borders = range(0, self.num_elements + 1, self._chunk)
        start_all_gather(self.output, borders, self._group).wait()

    def check(self) -> None:
        """Runs the operation on known values, checks every element, and zeroes the input."""
        # Every rank gives every chunk a different value, so that a misplaced chunk is detected.
        self.input.copy_(self._chunk_numbers(self.input) * (self.rank + 1))
        self.run()
        expected = self._expected()
        if expected is not None and not bool((self.output == expected).all()):
            raise PacelineError(
                f"rank {self.rank}: {self.operation} of {self.size_bytes} bytes gave a wrong result"
            )
        self.input.zero_()  # Repeated sums stay finite.

    def _expected(self) -> Tensor | float | None:
        total = float(self.world_size * (self.world_size + 1) // 2)
        own = self.rank + 1.0
        if self.operation in ("reduce_scatter", "reduce_to_owners"):
            return total * own
        if self.operation == "reduce" and self.rank != _ROOT:
            return None  # The buffers of the other ranks are undefined.
        factors: dict[Operation, float] = {
            "all_reduce": total,
            "reduce": total,
            "broadcast": _ROOT + 1.0,
            "all_to_all": own,
        }
        return self._chunk_numbers(self.output) * factors.get(self.operation, 1.0)

    def _chunk_numbers(self, tensor: Tensor) -> Tensor:
        """Returns the chunk number of each element, counted from one."""
        num_chunks = tensor.numel() // self._chunk
        numbers = torch.arange(1.0, num_chunks + 1, device=tensor.device)
        return numbers.repeat_interleave(self._chunk)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveTimes:
    """Results of one case, identical on all ranks."""

    size_bytes: int
    """Bytes actually moved: the size of the case, rounded to whole elements for each rank."""
    samples: list[float]
    """The slowest rank's seconds of each repetition."""


def measure_collective(device: torch.device, case: CollectiveCase) -> CollectiveTimes:
    """Measures one case; an error anywhere in it names rank, operation and size."""
    try:
        collective = Collective(case.operation, case.size_bytes, device)
        collective.check()
        warmup = [time_call(collective, device) for _ in range(max(1, case.sweep.warmup))]
        repetitions = _agree_on_repetitions(warmup[-1], case, device)
        samples = [time_call(collective, device) for _ in range(repetitions)]
        slowest = reduce_numbers(samples, dist.ReduceOp.MAX, device)
    except RuntimeError as error:
        raise collective_error(case.operation, case.size_bytes, error) from error
    return CollectiveTimes(size_bytes=collective.size_bytes, samples=slowest)


def time_call(collective: Collective, device: torch.device) -> float:
    """Returns the seconds of one call on this rank."""
    if collective.operation in _ROOTED:
        dist.barrier()
    synchronize(device)
    started = time.perf_counter()
    collective.run()
    synchronize(device)
    return time.perf_counter() - started


def all_reduce_self_test(rank: int, _world_size: int) -> list[float]:
    """All-reduces 1 MiB, checks every element, and returns the seconds of five more calls."""
    device = nth_device(device_type_of_backend(dist.get_backend()), rank)
    collective = Collective("all_reduce", MIB, device)
    collective.check()  # Also sets up the connection.
    return [time_call(collective, device) for _ in range(5)]


def _agree_on_repetitions(seconds: float, case: CollectiveCase, device: torch.device) -> int:
    (slowest,) = reduce_numbers([seconds], dist.ReduceOp.MAX, device)
    affordable = int(case.sweep.time_limit_s / max(slowest, 1e-9))
    steps = case.sweep.steps
    return max(min(_MINIMUM_REPETITIONS, steps), min(steps, affordable))


# Time allowed beyond measuring: starting ranks, allocating, checking.
_GRACE_S = 60.0

Samples: TypeAlias = dict[Operation, dict[int, list[float]]]


def collective_records(sweep: CollectiveSweep, _on_progress: Progress) -> Iterator[Record]:
    """Measures every case, then fits latency and bandwidth; yields records on rank 0 only."""
    groups = measuring_ranks(
        world_sizes=sweep.world_sizes,
        default=(2, 4),
        flag="--world-sizes",
        device=sweep.device,
        timeout_s=sweep.timeout_s,
        # Longer than a collective's timeout, so that the waiting rank reports a stuck one.
        run_timeout_s=sweep.timeout_s + 2 * sweep.time_limit_s + _GRACE_S,
    )
    for ranks in groups:
        yield from ranks.on_first(_measure_all(sweep, ranks))


def _measure_all(sweep: CollectiveSweep, ranks: MeasuringRanks) -> Iterator[Record]:
    topology: dict[str, CaseValue] = {**ranks.topology, "dtype": "float32"}
    samples: Samples = collections.defaultdict(dict)
    for case in sweep.cases():
        fields = {"operation": case.operation, "size_bytes": case.size_bytes, **topology}
        fields |= {"warmup": sweep.warmup, "steps": sweep.steps}
        times: CollectiveTimes | None
        times, outcome, reason = ranks.attempt(
            functools.partial(ranks.run, measure_collective, case)
        )
        if times is None:
            yield measured("comm", fields, {}, outcome=outcome, reason=reason)
            continue
        samples[case.operation][times.size_bytes] = times.samples
        yield measured("comm", fields, _numbers(case, times, ranks.world_size))
    for operation, by_size in samples.items():
        if len(by_size) > 1:
            yield from fit_records(operation, by_size, topology)


def _numbers(case: CollectiveCase, times: CollectiveTimes, world_size: int) -> Numbers:
    algorithm = times.size_bytes / statistics.median(times.samples)
    return {
        "time_s": times.samples,
        "algorithm_bandwidth_bytes_per_s": algorithm,
        "bus_bandwidth_bytes_per_s": algorithm * float(bus_factor(case.operation, world_size)),
    }


def fit_records(
    operation: Operation, samples: dict[int, list[float]], topology: dict[str, CaseValue]
) -> Iterator[Record]:
    """Yields latency and bandwidth of an operation, for each fitted range of sizes."""
    fit = fit_collective(samples)
    largest = max(samples)
    world_size = int(str(topology["world_size"]))
    link = find_link(topology)
    fastest = largest / statistics.median(samples[largest])
    warnings = find_warnings(
        fit,
        bus_bytes_per_s=fastest * float(bus_factor(operation, world_size)),
        line_bytes_per_s=None if link is None else link.bytes_per_s,
    )
    for segment in fit.segments:
        metrics = {
            "latency_s": Metric.from_estimate(segment.latency_s),
            "max_relative_error": Metric(value=fit.max_relative_error),
        }
        if segment.bytes_per_s is not None:
            metrics["algorithm_bandwidth_bytes_per_s"] = Metric.from_estimate(segment.bytes_per_s)
        yield measured(
            "collective_fit",
            {
                "operation": operation,
                "smallest_bytes": segment.smallest_bytes,
                "largest_bytes": segment.largest_bytes,
                **topology,
            },
            metrics,
            warnings=[str(warning) for warning in warnings],
        )
