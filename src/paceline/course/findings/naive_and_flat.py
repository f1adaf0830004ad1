"""What the figures say of gradients that are sent after backward: one by one, or all at once."""

from collections.abc import Sequence

from paceline.accounting.communication.collectives import bus_factor
from paceline.core.units import format_seconds
from paceline.course.findings.phrases import verdict
from paceline.records import Record
from paceline.records.links import describe_unknown_link, find_link, is_loopback
from paceline.reports.evidence.fields import case_number
from paceline.reports.evidence.strategies import (
    exposed_ratio,
    exposed_seconds,
    of_strategies,
    step_ratio,
    step_seconds,
)

_LINE_TOLERANCE = 0.15
"""Of the time that a line needs, within which a measurement agrees with it."""


def naive_sentences(naive: Record, group: Sequence[Record]) -> list[str]:
    """Says what one message per parameter costs, beside the others of its group."""
    step, exposed = step_seconds(naive), exposed_seconds(naive)
    sentences = [
        f"{'Communication' if exposed > step / 2 else 'Computing'} dominates: of a step of "
        f"{format_seconds(step)} communication takes {format_seconds(exposed)}, "
        f"{exposed / step:.0%}, in {naive.metrics['num_messages'].value:.0f} messages, one per "
        "parameter, when backward is over."
    ]
    for alone in of_strategies(group, "none"):
        ratio = step_ratio(naive, alone)
        if ratio is not None:
            longer = f"{ratio.describe()} as long"
            meaning = {
                "less": f"with it, {longer}, so they differ by something other than communication",
                "more": f"data parallelism makes it {longer}",
                "alike": f"with it, {longer}, which cannot be told apart",
                "unknown": f"data parallelism makes it {longer}, {ratio.judged_by('round')}",
            }[ratio.standing]
            sentences.append(
                f"Without any synchronisation the step takes {format_seconds(step_seconds(alone))}:"
                f" {meaning}."
            )
    return [*sentences, *_line_sentences(naive, of_strategies(group, "flat"))]


def _line_sentences(naive: Record, flat: Sequence[Record]) -> list[str]:
    line = find_link(naive.case)
    measured = exposed_seconds(naive)
    if line is None:
        if is_loopback(naive.case):
            return [
                "Ranks on one host share its processors: what looks like communication is copying "
                "and adding, so this says nothing of a network."
            ]
        unknown = describe_unknown_link(naive.case)
        return [
            f"{unknown}, so there is nothing to hold the measured {format_seconds(measured)} "
            "against.",
            *_call_sentences(naive, flat),
        ]
    factor = float(bus_factor("all_reduce", case_number(naive, "world_size")))
    expected = factor * naive.metrics["gradient_bytes"].value / line.bytes_per_s
    if expected <= 0:
        return []
    text = (
        f"The line alone ({line.name}) needs {format_seconds(expected)} for the gradients; the "
        f"measured {format_seconds(measured)} {verdict(measured, expected, _LINE_TOLERANCE)}"
    )
    if measured < expected * (1 - _LINE_TOLERANCE):
        return [
            f"{text}: something other than this line carried them, or its rate is not the one "
            "assumed."
        ]
    calls = _call_sentences(naive, flat)
    if calls:
        return [f"{text}.", *calls]
    if measured > expected * (1 + _LINE_TOLERANCE):
        return [
            f"{text}. Nothing here tells whether the rest is the time of calls: one message for "
            "all gradients (flat) beside it would."
        ]
    if measured > expected:
        saved = format_seconds(measured - expected)
        return [f"{text}: fewer messages could save {saved} at most, fewer bytes more."]
    return [f"{text}: only fewer bytes or a faster line would shorten it."]


def _call_sentences(naive: Record, flat: Sequence[Record]) -> list[str]:
    """Says whether calls count, which only the same bytes in fewer messages can tell."""
    sentences = []
    for record in flat:
        ratio = exposed_ratio(record, naive)
        if ratio is None:
            continue
        meaning = {
            "less": "so the time of calls counts, and fewer messages help",
            "more": "so fewer messages do not help",
            "alike": "which cannot be told apart: fewer messages do not help",
            "unknown": ratio.judged_by("round"),
        }[ratio.standing]
        sentences.append(
            f"One message for all gradients takes {format_seconds(exposed_seconds(record))} "
            f"instead, {ratio.describe()} as long, {meaning}."
        )
    return sentences


def flat_sentences(naive: Record, flat: Record) -> list[str]:
    """Says what one message for everything gains over one per parameter."""
    sentences = []
    ratio = step_ratio(flat, naive)
    if ratio is not None:
        meaning = {
            "less": ": the calls that it saves cost more than joining the gradients",
            "more": ": joining the gradients, a copy of all of them, costs more than the calls "
            "that it saves",
            "alike": ": the two cannot be told apart",
            "unknown": f", {ratio.judged_by('round')}",
        }[ratio.standing]
        sentences.append(
            f"One message instead of {naive.metrics['num_messages'].value:.0f} changes the step "
            f"from {format_seconds(step_seconds(naive))} to {format_seconds(step_seconds(flat))}, "
            f"{ratio.describe()} as long{meaning}."
        )
    sentences.append(
        f"Communication goes from {format_seconds(exposed_seconds(naive))} to "
        f"{format_seconds(exposed_seconds(flat))}; all of it is still after backward, so only "
        "overlap can hide it."
    )
    return sentences
