"""What the figures say of communication during backward: what it gains, and what it leaves."""

from collections.abc import Mapping, Sequence

from paceline.core.units import format_seconds
from paceline.course.findings.phrases import listing
from paceline.records import Record, join_key
from paceline.records.links import is_loopback
from paceline.reports.evidence.fields import strategy_text
from paceline.reports.evidence.strategies import (
    exposed_seconds,
    of_strategies,
    step_ratio,
    step_seconds,
)

_AGREES = 0.2
"""Of a measured wait, within which the recurrence agrees with it."""
_MOST = 0.75
_ANY = 0.05
_OVERLAPPED = "overlapped_communication_s"


def overlap_sentences(records: Sequence[Record], predictions: Sequence[Record]) -> list[str]:
    """Says how the best of the buckets fares against the others, and against the model."""
    buckets = of_strategies(records, "bucketed")
    best = min(buckets, key=step_seconds)
    sentences = [_best_sentence(best, buckets), _waiting_sentence(best)]
    without = of_strategies(records, "none")
    if without:
        sentences += _beyond_sentences(best, without[0])
    else:
        sentences.append(
            "How much longer computing takes while messages travel is not known without a step "
            "that sends nothing (none) beside it."
        )
    for name, what in (
        ("naive", "one message per parameter after backward"),
        ("flat", "one message after backward"),
        ("overlapped", "one message per parameter during backward"),
    ):
        for record in of_strategies(records, name):
            sentences += _against(best, record, what)
    rivals = of_strategies(records, "torch_ddp")
    if rivals:
        rival = min(rivals, key=step_seconds)
        sentences += _against(best, rival, f"the best of torch's, {strategy_text(rival)}")
    sentences += _prediction_sentences(buckets, predictions)
    if is_loopback(best.case):
        sentences.append(
            "On one host messages are the work of the same processors, so there is little to hide "
            "behind: claims of overlap need links (paceline lab run) or GPUs."
        )
    return sentences


def _best_sentence(best: Record, buckets: Sequence[Record]) -> str:
    name, step = strategy_text(best), format_seconds(step_seconds(best))
    ratios = {
        strategy_text(record): ratio
        for record in buckets
        if record is not best and (ratio := step_ratio(record, best)) is not None
    }
    if not ratios:
        return f"A step of {name} takes {step}."
    text = f"{name} has the shortest step of the {len(buckets)} bucket sizes, {step}"
    few = [ratio for ratio in ratios.values() if ratio.standing == "unknown"]
    if few:
        return f"{text}, {few[0].judged_by('round')}."
    alike = [name for name, ratio in ratios.items() if ratio.standing == "alike"]
    if not alike:
        return f"{text}."
    others = "the others" if len(alike) == len(ratios) > 1 else listing(alike)
    return f"{text}; {others} cannot be told apart from it."


def _waiting_sentence(best: Record) -> str:
    alone = best.metrics.get("communication_s")
    sent = "" if alone is None else f"Sent alone its messages take {format_seconds(alone.value)}; "
    text = f"{sent}when backward is over a step still waits {format_seconds(exposed_seconds(best))}"
    return f"{text[0].upper()}{text[1:]}."


def _beyond_sentences(best: Record, without: Record) -> list[str]:
    """Says what communication costs altogether: waiting for it, and computing beside it."""
    ratio = step_ratio(best, without)
    if ratio is None:
        return []
    nothing = f"a step that sends nothing ({format_seconds(step_seconds(without))})"
    beyond = step_seconds(best) - step_seconds(without)
    if beyond <= 0:
        return [f"It takes no longer than {nothing}."]
    text = f"It takes {format_seconds(beyond)} longer than {nothing}"
    slower = beyond - exposed_seconds(best)
    if slower > 0:
        text += (
            f": besides that wait, the rest of the step takes {format_seconds(slower)} longer "
            "while messages travel"
        )
    if ratio.standing == "alike":
        text += f"; the steps cannot be told apart, {ratio.describe()} as long"
    if ratio.standing == "unknown":
        text += f", {ratio.judged_by('round')}"
    return [f"{text}."]


def _against(best: Record, record: Record, what: str) -> list[str]:
    ratio = step_ratio(best, record)
    if ratio is None:
        return []
    step = format_seconds(step_seconds(record))
    exposed = f"with {format_seconds(exposed_seconds(record))} exposed there"
    if ratio.standing == "unknown":
        return [
            f"It takes {ratio.describe()} as long as {what} ({step}), {exposed}, "
            f"{ratio.judged_by('round')}."
        ]
    word = {
        "less": "is faster than",
        "more": "is slower than",
        "alike": "cannot be told apart from",
    }[ratio.standing]
    return [f"It {word} {what} ({step}): {ratio.describe()} as long, {exposed}."]


def _prediction_sentences(buckets: Sequence[Record], predictions: Sequence[Record]) -> list[str]:
    predicted = {join_key(record): exposed_seconds(record) for record in predictions}
    pairs = [
        (record, exposed_seconds(record), predicted[join_key(record)])
        for record in buckets
        if join_key(record) in predicted
    ]
    if not pairs:
        return [
            "What the recurrence expects of these sizes is not known: --bucket-size-mb auto, "
            "measured beside them, finds out what it needs."
        ]
    within = [
        abs(measured - expected) <= _AGREES * measured for _record, measured, expected in pairs
    ]
    record, measured, expected = max(pairs, key=lambda pair: abs(pair[1] - pair[2]))
    apart = abs(measured - expected)
    return [
        f"At {sum(within)} of {len(pairs)} bucket sizes the recurrence agrees with the measured "
        f"wait within {_AGREES:.0%}; it is furthest off at {strategy_text(record)}, where it "
        f"expects {format_seconds(expected)} and {format_seconds(measured)} were measured: "
        f"{format_seconds(apart)} apart, {apart / step_seconds(record):.1%} of the step."
    ]


def trace_sentences(waiting_least: Mapping[str, Record]) -> list[str]:
    """Says by strategy how much of communication is under computing, the least first.

    Args:
        waiting_least: By strategy, the timeline of the rank that waits least.
    """
    shares: dict[str, float] = {}
    sentences = []
    for name, record in waiting_least.items():
        hidden = record.metrics.get(_OVERLAPPED)
        if hidden is None:
            continue
        total = hidden.value + exposed_seconds(record)
        if total > 0:
            shares[name] = hidden.value / total
        else:
            sentences.append(f"{name}: no message was under way.")
    for name, share in sorted(shares.items(), key=lambda item: item[1]):
        word = "no overlap to speak of"
        if share >= _ANY:
            word = "most of it overlaps" if share >= _MOST else "some of it overlaps"
        sentences.append(
            f"{name}: {format_seconds(exposed_seconds(waiting_least[name]))} exposed on the rank "
            f"that waits least, {share:.0%} of communication under computing: {word}."
        )
    return sentences
