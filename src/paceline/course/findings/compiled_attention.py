"""Attention that stores its scores, plain beside compiled: the table, and what it says."""

import dataclasses
from collections.abc import Sequence

from paceline.course.findings.attention import both_passes, compare_passes, growth_power
from paceline.course.findings.phrases import times
from paceline.records import Record
from paceline.reports.evidence.fields import case_number
from paceline.reports.tables.columns import three_digits
from paceline.reports.tables.table import Table

_KEPT = 0.5
"""Whoever keeps less than this share of what plain attention keeps has let go of the scores."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledPair:
    """The same case twice."""

    width: float
    length: float
    plain: Record
    compiled: Record


def pair_compiled(measured: Sequence[Record]) -> list[CompiledPair]:
    """Returns the cases that were measured both ways, the longest last."""
    ways: dict[tuple[float, float], dict[bool, Record]] = {}
    for record in measured:
        place = (case_number(record, "context"), case_number(record, "head_dim"))
        ways.setdefault(place, {})[record.case["compile"] != "none"] = record
    return [
        CompiledPair(width=width, length=length, plain=found[False], compiled=found[True])
        for (length, width), found in sorted(ways.items(), key=lambda item: item[0])
        if len(found) > 1
    ]


def compiled_table(pairs: Sequence[CompiledPair]) -> Table:
    """Returns a row per width and length."""
    return Table(
        headers=(
            *("head dim", "context", "forward (ms)", "compiled", "backward (ms)", "compiled"),
            "both, compiled to plain",
        ),
        rows=tuple(
            (
                f"{pair.width:g}",
                f"{pair.length:g}",
                *(
                    three_digits(record.metrics[f"{phase}_time_s"].value * 1e3)
                    for phase in ("forward", "backward")
                    for record in (pair.plain, pair.compiled)
                ),
                _ratio_text(pair),
            )
            for pair in sorted(pairs, key=lambda pair: (pair.width, pair.length))
        ),
        caption="attention that stores its scores, plain and compiled",
    )


def _ratio_text(pair: CompiledPair) -> str:
    ratio = compare_passes(pair.compiled, pair.plain)
    return "n/a" if ratio is None else f"{ratio.value:.2f}"


def compiled_sentences(pairs: Sequence[CompiledPair]) -> list[str]:
    """Says what compiling gains at the longest length, and over all."""
    longest = pairs[-1]
    sentences = []
    ratio = compare_passes(longest.compiled, longest.plain)
    if ratio is not None:
        meaning = {
            "less": ": fusing what lies between the products saves passes over the scores",
            "more": ": compiling makes it slower here",
            "alike": ": the two cannot be told apart",
            "unknown": f", {ratio.judged_by('sample')}",
        }[ratio.standing]
        sentences.append(
            f"At length {longest.length:g} (head width {longest.width:g}) compiled attention takes "
            f"{times(ratio.value)} the time of both passes{meaning}."
        )
    ratios = [
        both_passes(pair.compiled).value / plain
        for pair in pairs
        if (plain := both_passes(pair.plain).value) > 0
    ]
    if len(ratios) > 1:
        sentences.append(
            f"Over all {len(ratios)} cases the ratio of times lies between {min(ratios):.2f} and "
            f"{max(ratios):.2f}."
        )
    return [*sentences, *_memory_sentences(pairs)]


def _memory_sentences(pairs: Sequence[CompiledPair]) -> list[str]:
    longest = pairs[-1]
    kept, plain = (
        record.metrics["saved_for_backward_bytes"].value
        for record in (longest.compiled, longest.plain)
    )
    if plain <= 0:
        return []
    meaning = (
        "most of what plain attention keeps is still kept"
        if kept > _KEPT * plain
        else "most of the scores are computed again in backward instead of kept"
    )
    sentences = [f"For backward it keeps {times(kept / plain)} as many bytes: {meaning}."]
    shorter = [pair for pair in pairs[:-1] if pair.width == longest.width]
    if shorter:
        power = growth_power(shorter[-1].compiled, longest.compiled, "peak_bytes")
        if power is not None:
            sentences.append(
                f"Its peak grows with power {power:.2f} of the length from {shorter[-1].length:g} "
                f"to {longest.length:g}."
            )
    return sentences
