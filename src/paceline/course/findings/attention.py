"""What the figures say of implementations of attention side by side: time, memory, format."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from paceline.core.device_table import find_device
from paceline.core.errors import HardwareError
from paceline.core.units import format_binary_bytes, format_decimal, format_seconds
from paceline.course.findings.phrases import exponent, listing, times
from paceline.records import Metric, Record
from paceline.reports.evidence.comparison import Ratio, compare
from paceline.reports.evidence.fields import case_number

Place: TypeAlias = tuple[float, str, float]
"""Length, format and head width."""
Places: TypeAlias = Mapping[Place, Mapping[str, Record]]
"""What was measured, by place and implementation."""

_SAME = 0.05
"""Peaks that differ by less than this share are called alike."""


def both_passes(record: Record) -> Metric:
    """Returns the time of both passes; older records have that of each only."""
    both = record.metrics.get("both_time_s")
    if both is not None:
        return both
    passes = [record.metrics[f"{name}_time_s"] for name in ("forward", "backward")]
    samples = [sum(pair) for pair in zip(*(each.samples for each in passes), strict=False)]
    return Metric.from_samples(samples or [sum(each.value for each in passes)])


def compare_passes(subject: Record, baseline: Record) -> Ratio | None:
    """Compares the time of both passes of cases that ran one after the other."""
    return compare(both_passes(subject), both_passes(baseline))


def growth_power(first: Record, last: Record, metric: str) -> float | None:
    """Returns the power of the length with which a metric grows; None for what has no logarithm."""
    values = [record.metrics[metric].value for record in (first, last)]
    if min(values) <= 0:
        return None
    lengths = [case_number(record, "context") for record in (first, last)]
    return exponent((lengths[0], values[0]), (lengths[1], values[1]))


def flash_sentences(records: Sequence[Record]) -> list[str]:
    """Says how implementations compare where most of them were measured."""
    places = _by_place([record for record in records if record.metrics])
    shared = {place: each for place, each in places.items() if len(each) > 1}
    sentences = []
    if shared:
        # The longest at which most of them, and so the one that stores its scores, still ran.
        place = max(shared, key=lambda place: (len(shared[place]), place))
        fastest = min(shared[place].values(), key=lambda record: both_passes(record).value)
        sentences += [
            _fastest_sentence(place, fastest, list(shared[place].values())),
            *_peak_memory_sentences(shared, place),
            *_format_sentences(places, str(fastest.case["implementation"])),
            *_rate_sentences(fastest),
        ]
    else:
        sentences.append(
            "No two implementations were measured at the same length, width and format, so they "
            "cannot be compared."
        )
    return [*sentences, *_unmeasured_sentences(records)]


def _by_place(records: Sequence[Record]) -> dict[Place, dict[str, Record]]:
    places: dict[Place, dict[str, Record]] = {}
    for record in records:
        place = (
            case_number(record, "context"),
            str(record.case["dtype"]),
            case_number(record, "head_dim"),
        )
        places.setdefault(place, {})[_name(record)] = record
    return places


def _fastest_sentence(place: Place, fastest: Record, rivals: Sequence[Record]) -> str:
    length, dtype, width = place
    slowest = max(rivals, key=lambda record: both_passes(record).value)
    compared = {
        _name(record): ratio
        for record in rivals
        if record is not fastest and (ratio := compare_passes(record, fastest)) is not None
    }
    text = (
        f"At length {length:g}, width {width:g}, {dtype}, {_name(fastest)} has the shortest time "
        f"of both passes, {format_seconds(both_passes(fastest).value)}"
    )
    if _name(slowest) in compared:
        text += f"; {_name(slowest)} takes {times(compared[_name(slowest)].value)} as long"
    alike = [name for name, ratio in compared.items() if ratio.standing == "alike"]
    if alike:
        text += f"; {listing(alike)} cannot be told apart from it"
    few = [ratio for ratio in compared.values() if ratio.standing == "unknown"]
    if few:
        fewest = min(few, key=lambda ratio: ratio.num_samples)
        text += f"; part of this is {fewest.judged_by('sample')}"
    return f"{text}."


def _peak_memory_sentences(shared: Places, place: Place) -> list[str]:
    peaks = _peaks(shared[place])
    most = max(peaks, key=lambda name: peaks[name])
    least = min(peaks, key=lambda name: peaks[name])
    if peaks[least] <= 0:
        return []
    ratio = peaks[most] / peaks[least]
    sizes = [format_binary_bytes(peaks[name]) for name in (most, least)]
    if ratio < 1 + _SAME:
        return [f"All peak alike, between {sizes[1]} and {sizes[0]}."]
    text = f"{most} peaks at {sizes[0]}, {times(ratio)} the {sizes[1]} of {least}"
    shorter = [
        other
        for other, found in shared.items()
        if other[0] < place[0] and other[1:] == place[1:] and {most, least} <= found.keys()
    ]
    if not shorter:
        return [f"{text}."]
    first = min(shorter)
    before = _peaks(shared[first])
    if before[least] <= 0:
        return [f"{text}."]
    gap = before[most] / before[least]
    if ratio > gap * (1 + _SAME):
        trend = "grows"
    else:
        trend = "stays" if ratio > gap * (1 - _SAME) else "shrinks"
    return [f"{text}; at length {first[0]:g} it is {times(gap)}: the gap {trend} with the length."]


def _peaks(found: Mapping[str, Record]) -> dict[str, float]:
    return {name: record.metrics["peak_bytes"].value for name, record in found.items()}


def _format_sentences(places: Places, name: str) -> list[str]:
    pairs = [
        (length, width, places[length, "float32", width][name], found[name])
        for (length, dtype, width), found in sorted(places.items(), key=lambda item: item[0])
        if dtype == "bfloat16"
        and name in found
        and name in places.get((length, "float32", width), {})
    ]
    if not pairs:
        return []
    length, width, full, half = pairs[-1]
    gain = compare_passes(full, half)
    if gain is None:
        return []
    meaning = {
        "more": ": sixteen bits are faster here",
        "less": ": sixteen bits are slower here",
        "alike": ": the two cannot be told apart, so either the format does not reach the kernel "
        "or nothing is faster in it here",
        "unknown": f", {gain.judged_by('sample')}",
    }[gain.standing]
    return [
        f"{name} in bfloat16 is {times(gain.value)} as fast as in float32 at length {length:g}, "
        f"width {width:g}{meaning}."
    ]


def _rate_sentences(record: Record) -> list[str]:
    rate = record.metrics.get("flops_per_s")
    if rate is None:
        return []
    text = f"{_name(record)} reaches {format_decimal(rate.value, 'FLOP/s')} there"
    dtype = str(record.case["dtype"])
    if dtype == "float32" and record.case["float32_matmul_precision"] != "highest":
        dtype = "tfloat32"
    try:
        peak = find_device(str(record.case["hardware"])).peak(dtype)  # type: ignore[arg-type]
    except HardwareError:
        return [f"{text}; no document states this device's peak in {dtype}, so no share of it."]
    share = rate.value / peak.value
    if share > 1:
        return [f"{text}, more than the device's peak in {dtype}: it cannot be that format's work."]
    return [f"{text}, {share:.0%} of the device's peak in {dtype}."]


def _unmeasured_sentences(records: Sequence[Record]) -> list[str]:
    cases: dict[str, list[Record]] = {}
    for record in records:
        cases.setdefault(_name(record), []).append(record)
    sentences = []
    for name, tried in cases.items():
        without = [record for record in tried if not record.metrics]
        if without:
            first = shortest(without)
            sentences.append(
                f"{name} has no numbers in {len(without)} of {len(tried)} cases, the shortest at "
                f"length {first.case['context']}: {why_missing(first)}."
            )
    return sentences


def shortest(records: Sequence[Record]) -> Record:
    """Returns the record of the shortest length."""
    return min(records, key=lambda record: case_number(record, "context"))


def why_missing(record: Record) -> str:
    """Says why a case has no numbers."""
    return f"{record.outcome.replace('_', ' ')}, {record.reason}"


def _name(record: Record) -> str:
    return str(record.case["implementation"])
