"""Turns measured collectives into records, on the launcher's ranks or on ranks started here."""

import collections
import functools
import statistics
from collections.abc import Iterator
from typing import TypeAlias

from paceline.accounting.communication.alpha_beta_fit import find_warnings, fit_collective
from paceline.accounting.communication.collectives import bus_factor
from paceline.benchmarks.collectives.config import CollectiveCase, CollectiveSweep
from paceline.benchmarks.collectives.measure import CollectiveTimes, measure_collective
from paceline.benchmarks.harness.ranks import MeasuringRanks, measuring_ranks
from paceline.benchmarks.harness.records import Numbers, measured
from paceline.core.collectives import Operation
from paceline.records import CaseValue, Metric, Record
from paceline.records.links import find_link

# Time allowed beyond measuring: starting ranks, allocating, checking.
_GRACE_S = 60.0

Samples: TypeAlias = dict[Operation, dict[int, list[float]]]


def collective_records(sweep: CollectiveSweep) -> Iterator[Record]:
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
        fields |= {"warmup": case.warmup, "steps": case.steps}
        times: CollectiveTimes | None
        times, reason = ranks.attempt(functools.partial(ranks.run, measure_collective, case))
        if times is None:
            yield measured("comm", fields, {}, outcome="failed", reason=reason)
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
