"""Findings about a traced step: dominant operators, call counts, FLOPs against formulas."""

from collections.abc import Iterator, Sequence

from paceline.core.finding import Finding
from paceline.course.findings.template import against, make_finding, standing
from paceline.records import Record, find_kind, join_key
from paceline.reports.evidence.profile_runs import ProfileRun, own_time_s
from paceline.reports.evidence.provenance import machine_of
from paceline.traces.catalog import OpClass
from paceline.traces.operators import EVERYWHERE

_MATMULS_PER_LAYER = 7
_SOFTMAX_OPERATIONS = 5
"""Per score: compare, subtract, exponentiate, add and divide."""
_SCORE_OPERATIONS = 4
"""Per score and channel: a multiplication and an addition in each of the two matmuls."""
_NUM_OTHERS = 2


def operator_findings(run: ProfileRun, stopwatch: Sequence[Record]) -> list[Finding]:
    """Returns findings about a traced step.

    `stopwatch` holds step benchmarks of any case. Those of the same step are compared with the
    trace.
    """
    phases = ["forward"]
    if run.in_range("backward", of_kinds=True):
        phases += ["backward", "optimizer", EVERYWHERE]
    return [
        *(_longest_operator(run, phase) for phase in phases if _time_s(run, phase)),
        *_softmax_to_matmuls(run),
        *_matmul_flops(run),
        *_matmul_count(run),
        *_trace_to_stopwatch(run, stopwatch),
    ]


def comparable_flops(run: ProfileRun) -> list[Record]:
    """Returns the predictions of matmul FLOPs that the trace can confirm.

    GPU traces list kernels, whose FLOPs are unknown. The matmuls inside fused attention are not
    traced as matmuls, so ranges with fused attention are left out.
    """
    counted = {join_key(record) for record in run.operators if record.metrics["flops"].value}
    return [
        record
        for record in run.expected
        if join_key(record) in counted
        and record.metrics["flops"].value
        and not _time_s(run, str(record.case["range"]), OpClass.ATTENTION)
    ]


def _longest_operator(run: ProfileRun, phase: str) -> Finding:
    total = _time_s(run, phase)
    longest = run.in_range(phase, of_kinds=False)[0]
    kinds = run.in_range(phase, of_kinds=True)
    others = [each for each in kinds if each.case["work"] != OpClass.MATMUL][:_NUM_OTHERS]
    return make_finding(
        f"longest_operator_in_{phase.replace(' ', '_')}",
        "{phase} takes {total_s}. The operator that takes longest is {operator}: {own_time_s} "
        "({share}) in {num_calls} calls. Time by kind of work: matmuls {matmul_share}{others}.",
        phase=phase.capitalize(),
        total_s=total,
        operator=str(longest.case["operator"]),
        own_time_s=own_time_s(longest),
        share=own_time_s(longest) / total,
        num_calls=longest.metrics["num_calls"].value,
        matmul_share=_time_s(run, phase, OpClass.MATMUL) / total,
        others="".join(f", {each.case['work']} {own_time_s(each) / total:.0%}" for each in others),
    )


def _softmax_to_matmuls(run: ProfileRun) -> Iterator[Finding]:
    softmax = _time_s(run, "attention_softmax")
    parts = [
        _time_s(run, name, OpClass.MATMUL) for name in ("attention_scores", "attention_values")
    ]
    head_dim = _model_field(run, "head_dim")
    if not softmax or not all(parts) or not head_dim:
        return
    ratio = softmax / sum(parts)
    per_operation = ratio * _SCORE_OPERATIONS * head_dim / _SOFTMAX_OPERATIONS
    is_slow = standing(per_operation, 1) == "more"
    yield make_finding(
        "softmax_to_matmuls",
        "Inside attention, softmax takes {softmax_s}, {time_ratio} times as long as the two "
        "matmuls ({matmul_s}). Softmax does {softmax_operations} operations per score, the matmuls "
        "{matmul_operations}: per operation, softmax takes {operation_ratio} times as long.",
        "Fuse softmax with the matmuls: alone, it reads and writes every score." if is_slow else "",
        softmax_s=softmax,
        matmul_s=sum(parts),
        time_ratio=ratio,
        softmax_operations=_SOFTMAX_OPERATIONS,
        matmul_operations=_SCORE_OPERATIONS * head_dim,
        operation_ratio=per_operation,
    )


def _matmul_flops(run: ProfileRun) -> Iterator[Finding]:
    expected = {join_key(each): each.metrics["flops"].value for each in comparable_flops(run)}
    if not expected:
        return
    traced = sum(
        each.metrics["flops"].value for each in run.operators if join_key(each) in expected
    )
    formula = sum(expected.values())
    yield make_finding(
        "matmul_flops",
        "The trace counts {traced_flops} FLOPs of matmuls; the formula gives {expected_flops}: "
        "{verdict}.",
        traced_flops=traced,
        expected_flops=formula,
        verdict=against(traced, formula),
    )


def _matmul_count(run: ProfileRun) -> Iterator[Finding]:
    # One torch matmul may launch several kernels, so matmul kernels of GPU traces do not count.
    calls = sum(
        record.metrics["num_calls"].value
        for record in run.in_range("forward", of_kinds=False)
        if record.case["operator"] == "aten::mm"
    )
    num_layers = _model_field(run, "num_layers")
    if calls and num_layers:
        yield make_finding(
            "weight_matmul_count",
            "Forward runs {num_matmuls} matmuls with weights; {matmuls_per_layer} matmuls in each "
            "of {num_layers} layers and one for the logits make {expected_num_matmuls}.",
            num_matmuls=calls,
            matmuls_per_layer=_MATMULS_PER_LAYER,
            num_layers=num_layers,
            expected_num_matmuls=_MATMULS_PER_LAYER * num_layers + 1,
        )


def _trace_to_stopwatch(run: ProfileRun, stopwatch: Sequence[Record]) -> Iterator[Finding]:
    timed = [record for record in stopwatch if _is_same_step(run, record)]
    if not run.steps or not timed:
        return
    traced = run.steps[-1].metrics["step_time_s"].value
    newest = max(timed, key=lambda record: record.environment.time)
    outside = newest.metrics["step_time_s"].value
    is_alike = standing(traced, outside) == "alike"
    yield make_finding(
        "trace_to_stopwatch",
        "The traced step takes {traced_step_time_s}; without tracing, the stopwatch measures "
        "{step_time_s}: {verdict}.",
        "" if is_alike else "Take shares from the trace and times from the stopwatch.",
        traced_step_time_s=traced,
        step_time_s=outside,
        verdict=against(traced, outside),
    )


def _is_same_step(run: ProfileRun, record: Record) -> bool:
    """Returns whether a step benchmark timed the traced step on the same machine."""
    step_time, memory = record.metrics.get("step_time_s"), run.memory
    if memory is None or step_time is None or step_time.value <= 0:
        return False
    fields = find_kind("step").join_key
    alike = all(record.case[field] == memory.case[field] for field in fields)
    return alike and machine_of(record) == machine_of(memory)


def _model_field(run: ProfileRun, field: str) -> int | None:
    value = None if run.memory is None else run.memory.case[field]
    return value if isinstance(value, int) else None


def _time_s(run: ProfileRun, name: str, work: OpClass | None = None) -> float:
    """Returns the time of a range, or of one kind of work in the range."""
    return sum(
        own_time_s(record)
        for record in run.in_range(name, of_kinds=True)
        if work is None or record.case["work"] == work
    )
