"""From collectives to records, on ranks that are there already or are started for it."""

import collections
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch

from paceline.accounting.collective_fit import find_warnings, fit_collective
from paceline.accounting.collectives import bus_factor
from paceline.benchmarks.communication import CollectiveTimes, measure_collective
from paceline.benchmarks.config import CommunicationCase, CommunicationSweep
from paceline.benchmarks.devices import current_environment, describe_place, resolve_device
from paceline.core.errors import PacelineError, UsageError
from paceline.core.operations import Operation
from paceline.parallel import RankPool, distributed_session, is_launched
from paceline.parallel.process_group import Session
from paceline.records import CaseValue, Metric, Record
from paceline.records.environment import threads_per_rank
from paceline.records.links import line_bytes_per_s

_DEFAULT_WORLD_SIZES = (2, 4)

# What a run may take beyond measuring: starting ranks, allocating, checking.
_GRACE_S = 60.0

Measure: TypeAlias = Callable[[CommunicationCase], CollectiveTimes]
Samples: TypeAlias = dict[Operation, dict[int, list[float]]]


def communication_records(sweep: CommunicationSweep) -> Iterator[Record]:
    """Measures every case, then fits latency and bandwidth; yields records on rank 0 only."""
    if is_launched(os.environ):
        if sweep.world_sizes:
            raise UsageError("--world-sizes: the launcher has started the ranks; leave it out")
        with distributed_session(device=sweep.device, timeout_s=sweep.timeout_s) as session:
            yield from _records_of_session(sweep, session)
        return
    device = resolve_device(sweep.device)
    for world_size in sweep.world_sizes or _DEFAULT_WORLD_SIZES:
        _require_devices(device, world_size)
        backend = "nccl" if device.type == "cuda" else "gloo"
        # Longer than a collective may take, so that a stuck one is named by the rank that waits.
        run_timeout_s = sweep.timeout_s + 2 * sweep.time_limit_s + _GRACE_S
        with RankPool(
            world_size, backend=backend, timeout_s=sweep.timeout_s, run_timeout_s=run_timeout_s
        ) as pool:

            def measure(case: CommunicationCase, pool: RankPool = pool) -> CollectiveTimes:
                times: CollectiveTimes = pool.run(_measure_on_rank, case, device.type)[0]
                return times

            place = _place(device, world_size=world_size, num_hosts=1, backend=backend)
            place["threads"] = threads_per_rank(world_size)
            yield from _measure_all(sweep, measure, place)


def _records_of_session(sweep: CommunicationSweep, session: Session) -> Iterator[Record]:
    place = _place(
        session.device,
        world_size=session.world_size,
        num_hosts=session.placement.num_hosts,
        backend=session.backend,
    )
    # A collective that failed on one rank has left the others in an unknown state: no going on.
    records = _measure_all(
        sweep, lambda case: measure_collective(case, session.device), place, go_on=False
    )
    for record in records:
        if session.rank == 0:
            yield record


def _measure_all(
    sweep: CommunicationSweep,
    measure: Measure,
    place: dict[str, CaseValue],
    *,
    go_on: bool = True,
) -> Iterator[Record]:
    samples: Samples = collections.defaultdict(dict)
    for case in sweep.cases():
        fields: dict[str, CaseValue] = {
            "operation": case.operation,
            "size_bytes": case.size_bytes,
            **place,
            "warmup": case.warmup,
            "steps": case.steps,
        }
        try:
            times = measure(case)
        except PacelineError as error:
            if not go_on:
                raise
            reason = str(error).strip().rpartition("\n")[2]
            yield _record("comm", fields, {}, reason=reason)
            continue
        samples[case.operation][times.size_bytes] = times.samples
        yield _record("comm", fields, _metrics(case, times, int(str(place["world_size"]))))
    for operation, by_size in samples.items():
        if len(by_size) > 1:
            yield from _fit_records(operation, by_size, place)


def _metrics(case: CommunicationCase, times: CollectiveTimes, world_size: int) -> dict[str, Metric]:
    time_s = Metric.from_samples(times.samples)
    algorithm = times.size_bytes / time_s.value
    return {
        "time_s": time_s,
        "algorithm_bandwidth_bytes_per_s": Metric(value=algorithm),
        "bus_bandwidth_bytes_per_s": Metric(
            value=algorithm * float(bus_factor(case.operation, world_size))
        ),
    }


def _fit_records(
    operation: Operation, samples: dict[int, list[float]], place: dict[str, CaseValue]
) -> Iterator[Record]:
    fit = fit_collective(samples)
    largest = max(samples)
    world_size = int(str(place["world_size"]))
    fastest = largest / Metric.from_samples(samples[largest]).value
    warnings = find_warnings(
        fit,
        bus_bytes_per_s=fastest * float(bus_factor(operation, world_size)),
        line_bytes_per_s=line_bytes_per_s(place),
    )
    for segment in fit.segments:
        metrics = {
            "latency_s": Metric.from_estimate(segment.latency_s),
            "max_relative_error": Metric(value=fit.max_relative_error),
        }
        if segment.bytes_per_s is not None:
            metrics["algorithm_bandwidth_bytes_per_s"] = Metric.from_estimate(segment.bytes_per_s)
        yield _record(
            "collective_fit",
            {
                "operation": operation,
                "smallest_bytes": segment.smallest_bytes,
                "largest_bytes": segment.largest_bytes,
                **place,
            },
            metrics,
            warnings=[f"{warning.name}: {warning.message}" for warning in warnings],
        )


def _measure_on_rank(
    rank: int, _world_size: int, case: CommunicationCase, device_type: str
) -> CollectiveTimes:
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    return measure_collective(case, device)


def _place(
    device: torch.device, *, world_size: int, num_hosts: int, backend: str
) -> dict[str, CaseValue]:
    return {
        "world_size": world_size,
        "num_hosts": num_hosts,
        "dtype": "float32",
        "backend": backend,
        **describe_place(device).as_case(),
    }


def _record(
    kind: str,
    case: dict[str, CaseValue],
    metrics: dict[str, Metric],
    *,
    reason: str | None = None,
    warnings: Sequence[str] = (),
) -> Record:
    return Record(
        kind=kind,
        case=case,
        environment=current_environment(),
        metrics=metrics,
        outcome="ok" if reason is None else "failed",
        reason=reason,
        warnings=tuple(warnings),
    )


def _require_devices(device: torch.device, world_size: int) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < world_size:
        raise UsageError(
            f"{world_size} ranks need as many GPUs, this machine has {torch.cuda.device_count()}; "
            "use --device cpu or fewer --world-sizes"
        )
