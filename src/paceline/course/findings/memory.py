"""What memory over a step says: what the peak holds, and what changes it."""

from collections.abc import Sequence

from paceline.core.units import format_binary_bytes
from paceline.course.findings.phrases import listing, times
from paceline.records import Record

_FULL = "float32"
_PARTS = {
    "parameters": "parameters",
    "optimizer_state": "optimizer state",
    "gradients": "gradients",
    "activations": "activations",
    "temporary": "temporary tensors",
    "other": "other tensors",
}


def memory_sentences(records: Sequence[Record], allocations: Sequence[Record]) -> list[str]:
    """Says what the peaks are made of.

    Args:
        records: Memory over steps that differ in phase, context and format alone, by context.
        allocations: The largest of one of these steps, the largest first.
    """
    sentences = []
    for phase in dict.fromkeys(str(record.case["phase"]) for record in records):
        full = [
            record
            for record in records
            if record.case["phase"] == phase and record.case["precision"] == _FULL
        ]
        if full:
            sentences.extend(_largest_part_sentences(full[-1]))
        if len(full) > 1:
            sentences.append(_context_sentence(full[0], full[-1]))
    sentences.extend(_precision_sentences(records))
    if allocations:
        sentences.append(_allocation_sentence(allocations))
    return sentences


def _allocation_sentence(allocations: Sequence[Record]) -> str:
    largest = allocations[0]
    size = largest.metrics["size_bytes"].value
    alike = [each for each in allocations if each.metrics["size_bytes"].value == size]
    number = sum(each.metrics["num_allocations"].value for each in alike)
    if number > 1:
        beginning = f"allocations ({largest.case['subject']}) are"
        size_text = f"{format_binary_bytes(size)} each, among them"
    else:
        beginning = f"allocation ({largest.case['subject']}) is"
        size_text = f"{format_binary_bytes(size)},"
    return (
        f"The largest single {beginning} {size_text} {largest.case['category']} of "
        f"{largest.case['operator']} at {largest.case['place']}."
    )


def _largest_part_sentences(record: Record) -> list[str]:
    peak = _peak(record)
    parts = _parts(record)
    if not peak or not parts:
        return []
    most = max(parts, key=lambda name: parts[name])
    return [
        f"Phase {record.case['phase']} at context {record.case['context']} peaks at "
        f"{format_binary_bytes(peak)}; {most} are the largest part, {parts[most] / peak:.0%}."
    ]


def _context_sentence(first: Record, last: Record) -> str:
    growth = _peak(last) - _peak(first)
    size = format_binary_bytes(abs(growth))
    moved = f"grows by {size}" if growth > 0 else f"falls by {size}" if growth else "stays the same"
    return (
        f"From context {first.case['context']} to {last.case['context']} that peak {moved}: "
        f"{_difference(first, last)}."
    )


def _precision_sentences(records: Sequence[Record]) -> list[str]:
    full = {
        (record.case["phase"], record.case["context"]): record
        for record in records
        if record.case["precision"] == _FULL
    }
    sentences = []
    for record in records:
        base = full.get((record.case["phase"], record.case["context"]))
        if base is None or record.case["precision"] == _FULL or not _peak(base):
            continue
        sentences.append(
            f"In {record.case['precision']} the peak of phase {record.case['phase']} at context "
            f"{record.case['context']} is {format_binary_bytes(_peak(record))}, "
            f"{_peak(record) / _peak(base) - 1:+.0%} against {_FULL}: {_difference(base, record)}."
        )
    return sentences


def _difference(first: Record, last: Record) -> str:
    """Names the part of the peak that changes most, and those that do not change."""
    before, after = _parts(first), _parts(last)
    both = [name for name in before if name in after]
    same = [name for name in both if before[name] == after[name] > 0]
    changed = [name for name in both if before[name] != after[name]]
    phrases = []
    if changed:
        most = max(changed, key=lambda name: abs(after[name] - before[name]))
        ratio = f", {times(after[most] / before[most])} as much" if before[most] else ""
        phrases.append(
            f"{most} change most, from {format_binary_bytes(before[most])} to "
            f"{format_binary_bytes(after[most])}{ratio}"
        )
    if same:
        phrases.append(f"{listing(same)} stay as they are")
    return "; ".join(phrases) or "what it holds is not known"


def _parts(record: Record) -> dict[str, float]:
    """Returns what the peak holds, by what it is for, as far as it is known."""
    return {
        name: metric.value
        for part, name in _PARTS.items()
        if (metric := record.metrics.get(f"{part}_at_peak_bytes")) is not None
    }


def _peak(record: Record) -> float:
    return record.metrics["peak_bytes"].value
