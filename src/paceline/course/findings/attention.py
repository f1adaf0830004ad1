"""Findings about attention: growth with length, compilation, implementations compared."""

import math
from collections.abc import Iterator, Sequence

from paceline.accounting import attention_saved_bytes
from paceline.core.finding import Finding
from paceline.core.specs import BatchShape
from paceline.core.units import format_binary_bytes
from paceline.course.findings.devices import peak_flops
from paceline.course.findings.pairs import both_passes, compare_passes, pairs_with_base
from paceline.course.findings.template import against, format_ratio, make_finding
from paceline.records import Record
from paceline.reports.evidence.fields import case_number

_QUADRATIC = 1.5
"""Exponents above this are closer to quadratic than to linear growth."""


def naive_findings(records: Sequence[Record]) -> Iterator[Finding]:
    """Yields findings on the growth of attention that stores its scores.

    `records` must be sorted by head dim and length.
    """
    by_head_dim: dict[float, list[Record]] = {}
    for record in records:
        if record.metrics:
            by_head_dim.setdefault(case_number(record, "head_dim"), []).append(record)
    longest = max(by_head_dim.items(), key=lambda item: (len(item[1]), item[0]))[1]
    if len(longest) > 1:
        yield from _growth(longest[-2], longest[-1])
    if longest[-1].case["dtype"] == "float32":
        yield _saved_bytes(longest[-1])
    yield from _missing(records)


def _growth(first: Record, last: Record) -> Iterator[Finding]:
    names = ("saved_for_backward_bytes", "forward_time_s")
    ratios = [last.metrics[name].value / (first.metrics[name].value or math.inf) for name in names]
    if not all(ratios):
        return
    longer = case_number(last, "context") / case_number(first, "context")
    saved_power, forward_power = (math.log(ratio, longer) for ratio in ratios)
    is_quadratic = saved_power > _QUADRATIC
    yield make_finding(
        "attention_memory_quadratic" if is_quadratic else "attention_memory_linear",
        "From length {first_length:g} to {case}, the memory saved for backward grows as "
        "length^{saved_power}, to {saved_bytes}, and forward time grows as "
        "length^{forward_power}, to {forward_time_s}.",
        "Recompute the scores tile by tile in backward." if is_quadratic else "",
        first_length=case_number(first, "context"),
        case=_describe(last),
        saved_power=saved_power,
        saved_bytes=_saved(last),
        forward_power=forward_power,
        forward_time_s=last.metrics["forward_time_s"].value,
    )


def _saved_bytes(record: Record) -> Finding:
    batch, length, head_dim = (
        int(case_number(record, name)) for name in ("batch", "context", "head_dim")
    )
    shape = BatchShape(num_sequences=batch, context_length=length)
    expected = attention_saved_bytes("naive", shape, head_dim, 4, causal=False)
    return make_finding(
        "attention_saved_bytes",
        "At {case}, attention saves {saved_bytes} for backward; the formula gives "
        "{expected_saved_bytes}: {verdict}.",
        case=_describe(record),
        saved_bytes=_saved(record),
        expected_saved_bytes=expected,
        verdict=against(_saved(record), expected),
    )


def _missing(records: Sequence[Record]) -> Iterator[Finding]:
    """Yields the shortest failed case of each implementation, or that all cases ran."""
    if all(record.metrics for record in records):
        yield make_finding("all_cases_ran", "All {num_cases} cases ran.", num_cases=len(records))
    for name in dict.fromkeys(_name(record) for record in records):
        tried = [record for record in records if _name(record) == name]
        missing = [record for record in tried if not record.metrics]
        if missing:
            shortest = min(missing, key=_size)
            yield make_finding(
                "cases_missing",
                "{implementation} did not run in {num_missing} of {num_cases} cases. The shortest "
                "of these is {case}: {outcome}, {reason}.",
                implementation=name,
                num_missing=len(missing),
                num_cases=len(tried),
                case=_describe(shortest),
                outcome=shortest.outcome.replace("_", " "),
                reason=str(shortest.reason),
            )


def compiled_findings(records: Sequence[Record]) -> Iterator[Finding]:
    """Yields the speedup of compilation at the longest length and its range over all cases."""
    pairs = pairs_with_base(sorted(records, key=_size), "compile", "none", _size)
    if not pairs:
        return
    compiled, plain = pairs[-1]
    ratios = [ratio.value for pair in pairs if (ratio := compare_passes(*pair))]
    yield make_finding(
        "compiled_to_plain_attention",
        "At {case}, compiled attention takes {ratio} as long as plain attention for forward and "
        "backward, and saves {saved_bytes} for backward instead of {plain_saved_bytes}.",
        case=_describe(plain),
        ratio=compare_passes(compiled, plain),
        saved_bytes=_saved(compiled),
        plain_saved_bytes=_saved(plain),
    )
    if len(ratios) > 1:
        yield make_finding(
            "compiled_to_plain_range",
            "Over all {num_cases} cases, compiled attention takes {least_ratio} to {most_ratio} "
            "times as long.",
            num_cases=len(ratios),
            least_ratio=min(ratios),
            most_ratio=max(ratios),
        )


def flash_findings(records: Sequence[Record]) -> Iterator[Finding]:
    """Yields a comparison of implementations at the case that most of them completed."""
    measured = [record for record in records if record.metrics]
    cases: dict[str, dict[str, Record]] = {}
    for record in sorted(measured, key=lambda record: (_size(record), str(record.case["dtype"]))):
        cases.setdefault(_describe(record), {})[_name(record)] = record
    # The longest case with the most implementations. The naive one, which stores its scores and
    # runs out of memory first, is then usually among them.
    found = max(reversed(cases.values()), key=len)
    if len(found) > 1:
        by_time = sorted(found.values(), key=lambda record: both_passes(record).value)
        yield _fastest(by_time)
        yield from _rate(by_time[0])
        yield from _precision([each for each in measured if _name(each) == _name(by_time[0])])
    else:
        yield make_finding(
            "nothing_to_compare",
            "No two implementations were measured at the same length, head dim and dtype.",
            "Measure them with one command.",
        )
    yield from _missing(records)


def _fastest(by_time: Sequence[Record]) -> Finding:
    fastest = by_time[0]
    figures, others = {}, []
    for record in by_time:
        peak = record.metrics["peak_bytes"].value
        figures[f"{_name(record)}_time_s"] = both_passes(record).value
        figures[f"{_name(record)}_peak_bytes"] = peak
        ratio = compare_passes(record, fastest)
        if record is not fastest and ratio is not None:
            others.append(
                f"{_name(record)} takes {format_ratio(ratio)} as long, with a peak memory of "
                f"{format_binary_bytes(peak)}"
            )
    return make_finding(
        "fastest_attention",
        "At {case}, {implementation} is the fastest: {time_s} for forward and backward, with a "
        "peak memory of {peak_bytes}; {others}.",
        case=_describe(fastest),
        implementation=_name(fastest),
        time_s=both_passes(fastest).value,
        peak_bytes=fastest.metrics["peak_bytes"].value,
        others="; ".join(others),
        **figures,
    )


def _rate(record: Record) -> Iterator[Finding]:
    rate = record.metrics.get("flops_per_s")
    if rate is None:
        return
    peak = peak_flops(record, str(record.case["dtype"]))
    is_possible = peak is None or rate.value <= peak
    yield make_finding(
        "attention_rate" if is_possible else "attention_rate_exceeds_peak",
        "At {case}, {implementation} reaches {flops_per_s}; the device's peak is "
        "{peak_flops_per_s}.",
        "" if is_possible else "Check that the timer synchronises, and check the dtype.",
        case=_describe(record),
        implementation=_name(record),
        flops_per_s=rate.value,
        peak_flops_per_s=peak,
    )


def _precision(records: Sequence[Record]) -> Iterator[Finding]:
    """Yields bf16 against float32 for one implementation, at the longest length with both."""
    dtypes = [record for record in records if record.case["dtype"] in ("float32", "bfloat16")]
    pairs = pairs_with_base(dtypes, "dtype", "float32", _size)
    if not pairs:
        return
    half, full = max(pairs, key=lambda pair: _size(pair[0]))
    ratio = compare_passes(half, full)
    is_alike = ratio is not None and ratio.standing == "alike"
    yield make_finding(
        "bfloat16_to_float32",
        "At {case}, {implementation} takes {ratio} as long as in float32 at the same size.",
        "Check that the dtype reaches the kernel." if is_alike else "",
        case=_describe(half),
        implementation=_name(half),
        ratio=ratio,
    )


def _size(record: Record) -> tuple[float, float]:
    return case_number(record, "context"), case_number(record, "head_dim")


def _describe(record: Record) -> str:
    case = record.case
    return f"length {case['context']}, head dim {case['head_dim']}, {case['dtype']}"


def _saved(record: Record) -> float:
    return record.metrics["saved_for_backward_bytes"].value


def _name(record: Record) -> str:
    return str(record.case["implementation"])
