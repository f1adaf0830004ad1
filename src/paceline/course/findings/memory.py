"""Findings about memory over a step: the parts of the peak, and their changes."""

from collections.abc import Iterator, Sequence

from paceline.core.finding import Finding
from paceline.course.findings.template import against, make_finding
from paceline.records import Record

_PARTS = ("parameters", "optimizer_state", "gradients", "activations", "temporary", "other")
_PHASES = {
    "forward": "a forward pass",
    "forward-backward": "forward and backward",
    "train": "a training step",
}


def memory_findings(records: Sequence[Record], allocations: Sequence[Record]) -> Iterator[Finding]:
    """Yields the largest part of each peak, and its changes with context and precision.

    `records` must be sorted by context, `allocations` by size, the largest first.
    """
    full = [record for record in records if record.case["precision"] == "float32" and _peak(record)]
    for phase in dict.fromkeys(str(record.case["phase"]) for record in full):
        by_context = [record for record in full if record.case["phase"] == phase]
        yield _largest_part(by_context[-1])
        if len(by_context) > 1:
            yield _change(f"{phase}_peak_by_context", by_context[0], by_context[-1])
    bases = {(record.case["phase"], record.case["context"]): record for record in full}
    for record in records:
        base = bases.get((record.case["phase"], record.case["context"]), record)
        if base is not record:
            name = f"{record.case['phase']}_peak_in_{record.case['precision']}"
            yield _change(name, base, record)
    if allocations:
        yield _largest_allocation(allocations)


def _largest_part(record: Record) -> Finding:
    parts = _parts(record)
    most = max(parts, key=lambda name: parts[name])
    return make_finding(
        f"{record.case['phase']}_peak",
        "Peak memory of {step} is {peak_bytes}; largest part: {part}, {part_bytes} ({share}).",
        step=_describe(record),
        peak_bytes=_peak(record),
        part=most.replace("_", " "),
        part_bytes=parts[most],
        share=parts[most] / _peak(record),
    )


def _change(name: str, first: Record, last: Record) -> Finding:
    """Compares two peaks and names the part that changed most."""
    before, after = _parts(first), _parts(last)
    most = max(before, key=lambda part: abs(after[part] - before[part]))
    return make_finding(
        name,
        "Peak memory of {last} is {last_peak_bytes}, of {first} {first_peak_bytes}: {verdict}; "
        "largest change: {part}, from {first_part_bytes} to {last_part_bytes}.",
        first=_describe(first),
        last=_describe(last),
        first_peak_bytes=_peak(first),
        last_peak_bytes=_peak(last),
        verdict=against(_peak(last), _peak(first)),
        part=most.replace("_", " "),
        first_part_bytes=before[most],
        last_part_bytes=after[most],
    )


def _largest_allocation(allocations: Sequence[Record]) -> Finding:
    case = {name: str(value) for name, value in allocations[0].case.items()}
    size = allocations[0].metrics["size_bytes"].value
    alike = [each for each in allocations if each.metrics["size_bytes"].value == size]
    return make_finding(
        "largest_allocation",
        "The largest allocation of {subject} is {size_bytes} ({num_allocations} of that size), "
        "made by {operator} at {place} (category: {category}).",
        **case,
        size_bytes=size,
        num_allocations=sum(each.metrics["num_allocations"].value for each in alike),
    )


def _describe(record: Record) -> str:
    case = record.case
    phase = _PHASES.get(str(case["phase"]), case["phase"])
    return f"{phase} at context {case['context']} in {case['precision']}"


def _parts(record: Record) -> dict[str, float]:
    """Returns the bytes at the peak by category."""
    return {part: record.metrics[f"{part}_at_peak_bytes"].value for part in _PARTS}


def _peak(record: Record) -> float:
    return record.metrics["peak_bytes"].value
