"""What records of collectives answer: throughput by size and ranks, beside what a line carries."""

from collections.abc import Sequence

from paceline.accounting.communication.collectives import bus_factor
from paceline.core.units import format_decimal, format_seconds
from paceline.course.answers.block import measured_block
from paceline.course.findings.phrases import times
from paceline.records import Record
from paceline.records.kinds import LINK_SHAPE
from paceline.records.links import describe_unknown_link, find_link, is_loopback
from paceline.reports.document.model import Block
from paceline.reports.document.pictures import draw_picture
from paceline.reports.evidence.fields import case_number
from paceline.reports.evidence.groups import Evidence, comparable_groups, varies
from paceline.reports.evidence.strategies import has_peers
from paceline.reports.tables.table import records_table

_OVER = ("size_bytes", "world_size", "threads")
_EQUAL = 0.03
_FLAT = 0.25
"""Bandwidths that differ by less than this share count as constant."""
_NEAR_LINE = 0.85
"""A share of the line's rate above which the line is what bounds."""
_ABOVE_LINE = 1.05
"""A share of the line's rate that no line carries."""
_CALLS_DOMINATE = 0.5
_CALLS_COUNT = 0.1
_CALLS_SEEN = 0.01
_SAME_SIZE = 0.01
"""Sizes are rounded to whole numbers for each rank, so that equal ones differ by less than this."""


def answer_all_reduce(evidence: Evidence) -> tuple[Block, ...]:
    """Answers how all-reduce's throughput depends on size and number of ranks."""
    blocks = []
    found = [each for each in evidence.find("comm", operation="all_reduce") if has_peers(each)]
    groups = comparable_groups(found, _OVER, holds=varies("size_bytes"))
    for number, group in enumerate(groups):
        ordered = sorted(
            group,
            key=lambda record: (
                case_number(record, "world_size"),
                case_number(record, "size_bytes"),
            ),
        )
        tables = [records_table(ordered)]
        fits = _fits(evidence, group)
        if fits:
            tables.append(records_table(fits))
        blocks.append(
            measured_block(
                group,
                tables=tables,
                pictures=(
                    draw_picture(
                        "communication",
                        ordered,
                        f"communication-{number}",
                        "Algorithm bandwidth of all-reduce by message size, with the line's rate",
                    ),
                ),
                findings=_sentences(ordered, fits),
            )
        )
    return tuple(blocks)


def _fits(evidence: Evidence, group: Sequence[Record]) -> list[Record]:
    case = group[0].case
    same = ("device", "hardware", "num_hosts", "backend", "dtype", *LINK_SHAPE)
    ranks = {_ranks(record) for record in group}
    return [
        record
        for record in evidence.find("collective_fit", operation="all_reduce")
        if record.metrics
        and all(record.case.get(field) == case.get(field) for field in same)
        and _ranks(record) in ranks
    ]


def _ranks(record: Record) -> tuple[float, float]:
    return case_number(record, "world_size"), case_number(record, "threads")


def _sentences(records: Sequence[Record], fits: Sequence[Record]) -> list[str]:
    lines = _lines([record for record in records if record.metrics and _bus(record) > 0])
    if not lines:
        return []
    long = [line for line in lines.values() if len(line) > 1]
    sentences = []
    if long:
        sentences.append(_sizes_sentence(long[0], fits))
    if len(lines) > 1:
        sentences += _ranks_sentences(lines)
    sentences.append(_line_sentence((long or list(lines.values()))[0][-1]))
    return sentences


def _lines(records: Sequence[Record]) -> dict[float, list[Record]]:
    """Returns by number of ranks the sizes in order, of those with the same number of threads."""
    by_ranks: dict[tuple[float, float], list[Record]] = {}
    for record in records:
        by_ranks.setdefault(_ranks(record), []).append(record)
    lines: dict[float, list[Record]] = {}
    for (world_size, _threads), line in by_ranks.items():
        if len(line) > len(lines.get(world_size, ())):
            lines[world_size] = line
    return lines


def _sizes_sentence(line: Sequence[Record], fits: Sequence[Record]) -> str:
    small, large = line[0], line[-1]
    gain = _bus(large) / _bus(small)
    change = (
        f"bus bandwidth goes from {_rate(small)} to {_rate(large)} ({times(gain)})"
        if abs(gain - 1) > _EQUAL
        else f"bus bandwidth is {_rate(large)} at either"
    )
    text = (
        f"On {small.case['world_size']} ranks {_size(small)} take {_time(small)} and "
        f"{_size(large)} {_time(large)}: {change}"
    )
    fit = [record for record in fits if _covers(record, small)]
    if fit:
        return f"{text}; {_call_text(fit[-1], small)}."
    if gain > 1 + _FLAT:
        return f"{text}: a byte takes longer in small messages, so few large ones are better."
    if gain < 1 - _FLAT:
        return f"{text}: a byte takes longer in large messages."
    return f"{text}: a byte takes about as long in either."


def _covers(fit: Record, record: Record) -> bool:
    size = case_number(record, "size_bytes")
    return (
        _ranks(fit) == _ranks(record)
        and case_number(fit, "smallest_bytes") <= size * (1 + _SAME_SIZE)
        and case_number(fit, "largest_bytes") >= size * (1 - _SAME_SIZE)
    )


def _call_text(fit: Record, smallest: Record) -> str:
    call = fit.metrics["latency_s"].value
    share = min(1.0, call / smallest.metrics["time_s"].value)
    if share >= _CALLS_DOMINATE:
        meaning = "calls dominate small messages, so few large ones are better"
    elif share >= _CALLS_COUNT:
        meaning = "every further message costs that much, so dividing them is not free"
    else:
        meaning = (
            "bytes dominate already there, so dividing messages down to this size costs little"
        )
    part = f"{share:.0%}" if share >= _CALLS_SEEN else f"less than {_CALLS_SEEN:.0%}"
    return (
        f"by the fit a call takes {format_seconds(call)} besides its bytes, {part} of the time of "
        f"{_size(smallest)}: {meaning}"
    )


def _ranks_sentences(lines: dict[float, list[Record]]) -> list[str]:
    few, many = (
        {case_number(record, "size_bytes"): record for record in lines[ranks]}
        for ranks in (min(lines), max(lines))
    )
    shared = few.keys() & many.keys()
    if not shared:
        return []
    ends = (few[max(shared)], many[max(shared)])
    ratio = _bus(ends[1]) / _bus(ends[0])
    if abs(ratio - 1) < _FLAT:
        carried = _factor(ends[1]) / _factor(ends[0])
        meaning = (
            "about constant, as a ring's should be; every link carries "
            f"{times(carried)} as many bytes of it"
        )
    elif ratio < 1:
        meaning = "lower, where that of a ring with links of its own would stay"
    else:
        meaning = "higher, where that of a ring over the same links would stay"
    return [
        f"From {min(lines):g} to {max(lines):g} ranks the bus bandwidth of {_size(ends[1])} goes "
        f"from {_rate(ends[0])} to {_rate(ends[1])}, {meaning}."
        + _crowding(ends[1], slower=ratio <= 1 - _FLAT)
    ]


def _crowding(record: Record, *, slower: bool) -> str:
    processors = record.environment.num_processors
    ranks = case_number(record, "world_size")
    if not slower or not is_loopback(record.case) or ranks <= processors:
        return ""
    return f" Here {ranks:g} ranks share {processors} processors."


def _line_sentence(record: Record) -> str:
    line = find_link(record.case)
    if line is None and is_loopback(record.case):
        return (
            f"There is no line here: {_rate(record)} is what processors copy and add, so no "
            "theoretical curve is drawn; links of a known rate (paceline lab run) have one."
        )
    if line is None:
        return (
            f"{describe_unknown_link(record.case)}, so no theoretical curve is drawn and "
            f"{_rate(record)} is held against nothing."
        )
    share = _bus(record) / line.bytes_per_s
    ceiling = format_decimal(line.bytes_per_s / _factor(record), "B/s")
    if share > _ABOVE_LINE:
        meaning = (
            "more than the line carries, so something other than this line carried it, or its "
            "rate is not the one assumed"
        )
    elif share > _NEAR_LINE:
        meaning = "the line bounds it, as the model says; only fewer bytes would be faster"
    else:
        meaning = "something else than this line bounds it"
    return (
        f"{_size(record)} reach {share:.1%} of the {format_decimal(line.bytes_per_s, 'B/s')} of "
        f"the line ({line.name}; a ring's algorithm bandwidth could be {ceiling}): {meaning}."
    )


def _factor(record: Record) -> float:
    return float(bus_factor("all_reduce", case_number(record, "world_size")))


def _bus(record: Record) -> float:
    return record.metrics["bus_bandwidth_bytes_per_s"].value


def _rate(record: Record) -> str:
    return format_decimal(_bus(record), "B/s")


def _time(record: Record) -> str:
    return format_seconds(record.metrics["time_s"].value)


def _size(record: Record) -> str:
    return format_decimal(case_number(record, "size_bytes"), "B")
