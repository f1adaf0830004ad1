"""Throughput compared with the link rate, for both collectives and training steps."""

from paceline.accounting.collectives import bus_factor
from paceline.core.finding import Finding
from paceline.core.units import format_decimal
from paceline.course.findings.template import against, make_finding, standing
from paceline.records import Record
from paceline.records.links import describe_unknown_link, find_link, is_loopback
from paceline.reports.evidence.fields import case_number

_MEANING = {
    "less": "The link is not the only limit: the latency of calls or copying takes the rest.",
    "alike": "The link is the bottleneck: only fewer bytes or a faster link would help.",
    "more": "The data did not go over this link, or the link's rate is not the one assumed.",
}


def link_finding(record: Record, num_bytes: float, seconds: float) -> Finding:
    """Compares the bus bandwidth of all-reducing `num_bytes` in `seconds` with the link rate."""
    bus = float(bus_factor("all_reduce", case_number(record, "world_size"))) * num_bytes / seconds
    size = format_decimal(num_bytes, "B")
    link = find_link(record.case)
    if link is not None:
        return make_finding(
            "link_share",
            "All-reducing {size} reaches a bus bandwidth of {bus_bytes_per_s}, {link_share} of the "
            "link's {link_bytes_per_s} ({link}): {verdict}.",
            _MEANING[standing(bus, link.bytes_per_s)],
            size=size,
            bus_bytes_per_s=bus,
            link_share=bus / link.bytes_per_s,
            link_bytes_per_s=link.bytes_per_s,
            link=link.name,
            verdict=against(bus, link.bytes_per_s),
        )
    if is_loopback(record.case):
        return make_finding(
            "loopback",
            "All ranks share the processors of one host: the bus bandwidth of {bus_bytes_per_s} "
            "for {size} measures copying and adding, not a network.",
            "To measure communication, use shaped links (paceline lab run) or GPUs.",
            size=size,
            bus_bytes_per_s=bus,
        )
    return make_finding(
        "unknown_link",
        "{unknown}, so the bus bandwidth of {bus_bytes_per_s} for {size} cannot be compared with "
        "it.",
        "Shape the links to a known rate (paceline lab run --rate).",
        unknown=describe_unknown_link(record.case),
        size=size,
        bus_bytes_per_s=bus,
    )
