"""Findings about all-reduce: throughput by message size and ranks, against the link rate."""

from collections.abc import Iterator, Sequence

from paceline.core.finding import Finding
from paceline.core.units import format_decimal
from paceline.course.findings.links import link_finding
from paceline.course.findings.template import against, make_finding, standing
from paceline.records import Record
from paceline.records.links import is_loopback
from paceline.reports.evidence.fields import case_number

_SAME_SIZE = 0.01
"""Relative tolerance for the sizes of a fit, which are rounded to whole elements per rank."""


def all_reduce_findings(records: Sequence[Record], fits: Sequence[Record]) -> Iterator[Finding]:
    """Yields findings on throughput by size and ranks, and on its bottleneck.

    `records` must be sorted by size.
    """
    curves = _curves([record for record in records if record.metrics and _bus(record) > 0])
    if not curves:
        return
    long = [curve for curve in curves.values() if len(curve) > 1]
    for curve in long[:1]:
        yield _by_size(curve[0], curve[-1])
        yield from [_latency(fit, curve[0]) for fit in fits if _covers(fit, curve[0])][-1:]
    yield from _by_ranks(curves)
    largest = (long or list(curves.values()))[0][-1]
    yield link_finding(largest, _size(largest), _seconds(largest))


def ranks_and_threads(record: Record) -> tuple[float, float]:
    """Returns the world size and threads per rank, which are constant along a curve."""
    return case_number(record, "world_size"), case_number(record, "threads")


def _curves(records: Sequence[Record]) -> dict[float, list[Record]]:
    """Returns the longest curve of each world size; a curve has one number of threads."""
    by_ranks: dict[tuple[float, float], list[Record]] = {}
    for record in records:
        by_ranks.setdefault(ranks_and_threads(record), []).append(record)
    curves: dict[float, list[Record]] = {}
    for (world_size, _threads), curve in by_ranks.items():
        if len(curve) > len(curves.get(world_size, ())):
            curves[world_size] = curve
    return curves


def _by_size(small: Record, large: Record) -> Finding:
    verdict = standing(_bus(large), _bus(small))
    return make_finding(
        "bandwidth_by_size",
        "On {world_size} ranks, an all-reduce of {small} takes {small_s} and one of {large} takes "
        "{large_s}. The larger message reaches a bus bandwidth of {large_bytes_per_s}, the smaller "
        "one {small_bytes_per_s}: {verdict}.",
        "Send few large messages." if verdict == "more" else "",
        world_size=case_number(small, "world_size"),
        small=_size_text(small),
        small_s=_seconds(small),
        large=_size_text(large),
        large_s=_seconds(large),
        large_bytes_per_s=_bus(large),
        small_bytes_per_s=_bus(small),
        verdict=against(_bus(large), _bus(small)),
    )


def _covers(fit: Record, record: Record) -> bool:
    size = _size(record)
    return (
        ranks_and_threads(fit) == ranks_and_threads(record)
        and case_number(fit, "smallest_bytes") <= size * (1 + _SAME_SIZE)
        and case_number(fit, "largest_bytes") >= size * (1 - _SAME_SIZE)
    )


def _latency(fit: Record, small: Record) -> Finding:
    latency_s = fit.metrics["latency_s"].value
    return make_finding(
        "call_latency",
        "The fit of latency and bandwidth, which is off by {error_share} at most, gives a latency "
        "of {latency_s} per call: {latency_share} of the time of an all-reduce of {small}.",
        error_share=fit.metrics["max_relative_error"].value,
        latency_s=latency_s,
        latency_share=min(1.0, latency_s / _seconds(small)),
        small=_size_text(small),
    )


def _by_ranks(curves: dict[float, list[Record]]) -> Iterator[Finding]:
    ends = (min(curves), max(curves))
    few, many = ({_size(each): each for each in curves[ranks]} for ranks in ends)
    shared = few.keys() & many.keys()
    if len(curves) < 2 or not shared:
        return
    first, last = few[max(shared)], many[max(shared)]
    ranks, processors = case_number(last, "world_size"), last.environment.num_processors
    is_crowded = is_loopback(last.case) and ranks > processors
    yield make_finding(
        "bandwidth_by_ranks",
        "From {few_ranks} to {many_ranks} ranks, the bus bandwidth of {size} goes from "
        "{few_bytes_per_s} to {many_bytes_per_s}: {verdict}. The bus bandwidth of a ring over "
        "dedicated links would stay the same.",
        f"Here {ranks:g} ranks share {processors} processors." if is_crowded else "",
        few_ranks=case_number(first, "world_size"),
        many_ranks=ranks,
        size=_size_text(last),
        few_bytes_per_s=_bus(first),
        many_bytes_per_s=_bus(last),
        verdict=against(_bus(last), _bus(first)),
    )


def _bus(record: Record) -> float:
    return record.metrics["bus_bandwidth_bytes_per_s"].value


def _seconds(record: Record) -> float:
    return record.metrics["time_s"].value


def _size(record: Record) -> float:
    return case_number(record, "size_bytes")


def _size_text(record: Record) -> str:
    return format_decimal(_size(record), "B")
