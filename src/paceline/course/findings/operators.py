"""What a traced step's operators say: which work dominates, how often, and whether counts agree."""

from collections.abc import Sequence

from paceline.core.units import format_seconds
from paceline.course.findings.phrases import times, verdict
from paceline.records import Record, find_kind, join_key
from paceline.reports.evidence.profile_runs import ProfileRun, own_time_s
from paceline.reports.evidence.provenance import same_machine
from paceline.traces.events.op_classes import OpClass
from paceline.traces.steps.operators import EVERYWHERE

_PRODUCTS_PER_LAYER = 7
_CLOSE = 0.15
_SOFTMAX_OPERATIONS = 5
"""Of every score: compare, subtract, exponentiate, add and divide."""
_SCORE_OPERATIONS = 4
"""Of every score and channel: a multiplication and an addition in each of the two products."""
_ALIKE = 2.0
"""Operations that take less than this many times as long as others take about as long."""
_NUM_OTHERS = 2


def operator_sentences(run: ProfileRun, stopwatch: Sequence[Record]) -> list[str]:
    """Says what one run tells of its step.

    Args:
        run: The traced step.
        stopwatch: Steps that were timed from outside, of any case and machine.
    """
    phases = ("forward", "backward", EVERYWHERE) if _has_backward(run) else ("forward",)
    return [
        *(sentence for phase in phases for sentence in _phase_sentences(run, phase)),
        *_change_sentences(run),
        *_softmax_sentences(run),
        *_flops_sentences(run),
        *_count_sentences(run),
        *_stopwatch_sentences(run, stopwatch),
    ]


def comparable_flops(run: ProfileRun) -> list[Record]:
    """Returns the predicted operations for which the trace counted the same ones.

    The trace of a GPU has kernels, whose operations are not known, and what a fused attention
    multiplies is not among its products.
    """
    traced = {join_key(record): record.metrics["flops"].value for record in run.operators}
    return [
        record
        for record in run.expected
        if traced.get(join_key(record))
        and record.metrics["flops"].value
        and not _fuses_attention(run, str(record.case["range"]))
    ]


def _has_backward(run: ProfileRun) -> bool:
    return bool(run.in_range("backward", of_kinds=True))


def _fuses_attention(run: ProfileRun, phase: str) -> bool:
    kinds = run.in_range(phase, of_kinds=True)
    return any(record.case["work"] == OpClass.ATTENTION for record in kinds)


def _products_name(run: ProfileRun) -> str:
    return "products outside of attention" if _fuses_attention(run, EVERYWHERE) else "products"


def _phase_sentences(run: ProfileRun, phase: str) -> list[str]:
    kinds = run.in_range(phase, of_kinds=True)
    single = run.in_range(phase, of_kinds=False)
    if not kinds or not single or not own_time_s(single[0]):
        return []
    longest = single[0]
    others = [each for each in kinds if each.case["work"] != OpClass.MATMUL][:_NUM_OTHERS]
    shares = [
        f"{_products_name(run)} are {_products_share(run, phase):.0%} of the time",
        *(f"{each.case['work']} {_share(each):.0%}" for each in others),
    ]
    return [
        f"In {'the ' if phase == EVERYWHERE else ''}{phase}, {longest.case['operator']} takes "
        f"longest, {format_seconds(own_time_s(longest))} ({_share(longest):.0%}) in "
        f"{_calls(longest.metrics['num_calls'].value)}; {', '.join(shares)}."
    ]


def _calls(count: float) -> str:
    return f"{count:g} call{'' if count == 1 else 's'}"


def _change_sentences(run: ProfileRun) -> list[str]:
    whole_s = _range_s(run, EVERYWHERE)
    if not (_range_s(run, "forward") and _range_s(run, "backward") and whole_s):
        return []
    before, after = (f"{_products_share(run, phase):.0%}" for phase in ("forward", EVERYWHERE))
    change = _products_share(run, EVERYWHERE) - _products_share(run, "forward")
    if before == after:
        moved = f"stays at {before}"
    else:
        moved = f"{'rises' if change > 0 else 'falls'} from {before} to {after}"
    reasons = f"in backward it is {_products_share(run, 'backward'):.0%}"
    optimizer_s = _range_s(run, "optimizer")
    if optimizer_s:
        share = _products_share(run, "optimizer")
        inside = f"where it is {share:.0%}" if share else "which has none"
        reasons += f", and the optimizer, {inside}, takes {optimizer_s / whole_s:.0%} of the step"
    return [
        f"From forward to the whole training step the share of {_products_name(run)} {moved}: "
        f"{reasons}."
    ]


def _softmax_sentences(run: ProfileRun) -> list[str]:
    softmax = _range_s(run, "attention_softmax")
    parts = [
        sum(
            own_time_s(record)
            for record in run.in_range(part, of_kinds=True)
            if record.case["work"] == OpClass.MATMUL
        )
        for part in ("attention_scores", "attention_values")
    ]
    if not softmax or not all(parts):
        return []
    ratio = softmax / sum(parts)
    sentence = (
        f"Inside attention softmax takes {format_seconds(softmax)}, {times(ratio)} as long as the "
        f"two products ({format_seconds(sum(parts))})"
    )
    width = None if run.memory is None else run.memory.case["head_dim"]
    if not isinstance(width, int) or width < 1:
        return [f"{sentence}."]
    slower = ratio * _SCORE_OPERATIONS * width / _SOFTMAX_OPERATIONS
    conclusion = (
        "so the count of operations accounts for its time."
        if slower < _ALIKE
        else f"so each takes {times(slower)} as long as one of theirs, and counting operations "
        "does not account for its time. It also reads and writes every score in memory, which "
        "fusing it into the products would spare."
    )
    return [
        f"{sentence}. It does some {_SOFTMAX_OPERATIONS} operations per score where they do "
        f"{_SCORE_OPERATIONS * width}, {conclusion}"
    ]


def _flops_sentences(run: ProfileRun) -> list[str]:
    expected = comparable_flops(run)
    if not expected:
        return []
    measured = {join_key(record): record.metrics["flops"].value for record in run.operators}
    traced = sum(measured[join_key(record)] for record in expected)
    formula = sum(record.metrics["flops"].value for record in expected)
    return [f"The trace's operations of products, {traced:.4g}: {verdict(traced, formula, 0.01)}."]


def _count_sentences(run: ProfileRun) -> list[str]:
    # A product of torch may take several kernels, so those of a GPU's trace are not counted.
    calls = sum(
        record.metrics["num_calls"].value
        for record in run.in_range("forward", of_kinds=False)
        if record.case["operator"] == "aten::mm"
    )
    num_layers = None if run.memory is None else run.memory.case["num_layers"]
    if not calls or not isinstance(num_layers, int):
        return []
    expected = _PRODUCTS_PER_LAYER * num_layers + 1
    return [
        f"Forward multiplies by a weight {calls:g} times; {_PRODUCTS_PER_LAYER} products in each "
        f"of {num_layers} blocks and the output layer make {expected}, which "
        + ("agrees." if calls == expected else "does not agree.")
    ]


def _stopwatch_sentences(run: ProfileRun, stopwatch: Sequence[Record]) -> list[str]:
    timed = [record for record in stopwatch if _is_same_step(run, record)]
    if not run.steps or not timed:
        return []
    inside = run.steps[-1].metrics["step_time_s"].value
    newest = max(timed, key=lambda record: record.environment.time)
    outside = newest.metrics["step_time_s"].value
    change = inside / outside - 1
    relation, reason = "matches", ""
    if abs(change) >= _CLOSE:
        relation = "does not match"
        reason = (
            "; tracing adds time to every operator"
            if change > 0
            else "; tracing saves no time, so something else differed between the two"
        )
    return [
        f"The traced step, {format_seconds(inside)}, {relation} the one on the stopwatch, "
        f"{format_seconds(outside)} ({change:+.0%}){reason}."
    ]


def _is_same_step(run: ProfileRun, record: Record) -> bool:
    """Whether a stopwatch timed what the run traced, on the same device."""
    step_time = record.metrics.get("step_time_s")
    return (
        run.memory is not None
        and step_time is not None
        and step_time.value > 0
        and same_machine(record, run.memory)
        and all(
            record.case[field] == run.memory.case[field] for field in find_kind("step").join_key
        )
    )


def _range_s(run: ProfileRun, name: str) -> float:
    return sum(own_time_s(record) for record in run.in_range(name, of_kinds=True))


def _products_share(run: ProfileRun, phase: str) -> float:
    kinds = run.in_range(phase, of_kinds=True)
    return sum(_share(record) for record in kinds if record.case["work"] == OpClass.MATMUL)


def _share(record: Record) -> float:
    return record.metrics["share"].value
