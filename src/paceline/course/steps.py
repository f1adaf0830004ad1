"""Answers from training steps: their time, what that goes into, and their memory."""

from collections.abc import Iterator, Sequence

from paceline.accounting import flops_per_token
from paceline.core.specs import precision_preset
from paceline.course.answers import (
    Answer,
    Row,
    compare_passes,
    data_sheet,
    measured_answer,
    numbers_of,
    pairs_with_base,
    peak_flops,
    row,
)
from paceline.records import CaseValue, Record, find_kind, join_key
from paceline.records.kinds import MODEL_FIELDS
from paceline.records.schema import model_of_case
from paceline.reports.comparison import compare
from paceline.reports.document import Block, picture_of
from paceline.reports.fields import case_number, model_key, model_name, num_parameters
from paceline.reports.plots.step import plot_work
from paceline.reports.record_sets import (
    ProfileRun,
    RecordSet,
    comparable_groups,
    describe_environments,
    describe_topology,
    find_profile_runs,
    machine_of,
    own_time_s,
    same_run,
    step_seconds,
    varies,
)
from paceline.reports.tables.profile import (
    attention_table,
    flops_table,
    memory_table,
    operator_table,
    work_table,
)
from paceline.reports.tables.table import Table, records_table
from paceline.traces.analysis import ALL_OPERATORS, step_subject
from paceline.traces.catalog import OpClass
from paceline.traces.operators import EVERYWHERE

_PHASES = ("forward", "backward", "optimizer", "step")
# AdamW reads weight, gradient and both moments, and writes all but the gradient.
_OPTIMIZER_BYTES = 7 * 4
_MATMULS_PER_LAYER = 7
_SOFTMAX_OPERATIONS = 5
"""Per score: compare, subtract, exponentiate, add and divide."""
_SCORE_OPERATIONS = 4
"""Per score and channel: a multiplication and an addition in each of the two matmuls."""
_MEMORY_PARTS = ("parameters", "optimizer_state", "gradients", "activations", "temporary", "other")
_LARGEST_SHOWN = 6


def step_time(record_set: RecordSet) -> Iterator[Answer]:
    """Yields the time of each phase by model."""
    found = _steps(record_set, precision="float32", compile="none")
    for group in comparable_groups(found, MODEL_FIELDS):
        ordered = sorted(group, key=num_parameters)
        measured = [record for record in ordered if record.metrics]
        yield measured_answer(ordered, [_model_row(measured)], ["step-time"])


def _model_row(measured: Sequence[Record]) -> Row:
    """Returns the phases of the largest model, and the least steady phase of any model."""
    largest = measured[-1]
    forward_s, backward_s, optimizer_s = (_seconds(largest, phase) for phase in _PHASES[:3])
    spread, noisiest = max(
        ((metric.std or 0.0) / metric.value, f"{phase} of {model_name(record)}")
        for record in measured
        for phase in _PHASES
        if (metric := record.metrics[f"{phase}_time_s"])
    )
    moved = _OPTIMIZER_BYTES * num_parameters(largest) / optimizer_s
    return row(
        "step_time",
        numbers_of(largest),
        backward_share=backward_s / step_seconds(largest),
        backward_ratio=backward_s / forward_s,
        flops_ratio=_flops_ratio(largest),
        optimizer_bytes_per_s=moved if largest.case["optimizer"] == "adamw" else None,
        memory_bytes_per_s=data_sheet(largest, lambda device: device.memory_bytes_per_s.value),
        noisiest=noisiest,
        spread_share=spread or None,
    )


def _flops_ratio(record: Record) -> float | None:
    """Returns the FLOPs of backward, with recomputed activations, over those of forward."""
    shape, context = model_of_case(record.case), int(case_number(record, "context"))
    if shape is None:
        return None
    recomputed = record.case["activation_checkpointing"] == "full"
    flops = flops_per_token(
        shape, context, activation_checkpointing="full" if recomputed else "none"
    )
    return (flops.backward + flops.recomputation) / flops.forward


def warmup(record_set: RecordSet) -> Iterator[Answer]:
    """Yields the step times after each number of warm-up steps."""
    found = _steps(record_set, compile="none")
    found = [record for record in found if isinstance(record.case.get("warmup"), int)]
    for group in comparable_groups(found, ("warmup",), holds=varies("warmup")):
        ordered = sorted(group, key=lambda record: case_number(record, "warmup"))
        rows = [_warmup_row(record) for record in ordered if record.metrics]
        yield measured_answer(ordered, rows, ["warmup"])


def _warmup_row(record: Record) -> Row:
    step = record.metrics["step_time_s"]
    first = (step.samples or (step.value,))[0]
    times = {"mean_s": step.mean, "std_s": step.std, "first_step_time_s": first}
    return row("warmup", numbers_of(record), times)


def low_precision(record_set: RecordSet) -> Iterator[Answer]:
    """Yields the time in bf16 and fp16 beside that in float32, by model."""
    for group in _groups_over("precision", _steps(record_set, compile="none")):
        pairs = pairs_with_base(group, "precision", "float32", model_key)
        yield measured_answer(group, [_precision_row(*pair) for pair in pairs], ["precision"])


def _precision_row(record: Record, base: Record) -> Row:
    low = peak_flops(record, precision_preset(str(record.case["precision"])).compute)
    full = peak_flops(record, "float32")
    return row(
        "low_precision",
        numbers_of(record),
        ratio=compare_passes(record, base),
        peak_ratio=low / full if low and full else None,
        optimizer_share=_seconds(record, "optimizer") / step_seconds(record),
        float32_optimizer_share=_seconds(base, "optimizer") / step_seconds(base),
    )


def compiled_step(record_set: RecordSet) -> Iterator[Answer]:
    """Yields the time of each compiled model beside that of the same model in eager mode."""
    for group in _groups_over("compile", _steps(record_set)):
        pairs = pairs_with_base(group, "compile", "none", model_key)
        yield measured_answer(group, [_compiled_row(*pair) for pair in pairs], ["step-time"])


def _compiled_row(record: Record, base: Record) -> Row:
    return row(
        "compiled_step",
        numbers_of(record),
        ratio=compare(record.metrics["step_time_s"], base.metrics["step_time_s"]),
        forward_ratio=compare(record.metrics["forward_time_s"], base.metrics["forward_time_s"]),
    )


def _groups_over(field: str, records: Sequence[Record]) -> list[list[Record]]:
    """Returns groups that differ only in the model and `field`, sorted by model size."""
    groups = comparable_groups(records, (field, *MODEL_FIELDS), holds=varies(field))
    return [
        sorted(group, key=lambda record: (num_parameters(record), str(record.case[field])))
        for group in groups
    ]


def _steps(record_set: RecordSet, **fields: CaseValue) -> list[Record]:
    """Returns training steps of models with known dimensions: fully timed ones and failures."""
    return [
        record
        for record in record_set.find("step", phase="train", **fields)
        if num_parameters(record) and (_is_timed(record) or not record.metrics)
    ]


def _is_timed(record: Record) -> bool:
    times = [record.metrics.get(f"{phase}_time_s") for phase in _PHASES]
    return all(time is not None and time.value > 0 for time in times)


def _seconds(record: Record, phase: str) -> float:
    return record.metrics[f"{phase}_time_s"].value


def longest_operator(record_set: RecordSet) -> Iterator[Answer]:
    """Yields the time of a traced forward pass or training step by kind of work."""
    runs = [run for run in find_profile_runs(record_set) if run.in_range("forward", of_kinds=False)]
    for number, run in enumerate(runs):
        kinds = [each for each in run.operators if each.case["operator"] == ALL_OPERATORS]
        hardware = "" if run.memory is None else f"; {describe_topology(run.memory)}"
        description = "Time of each phase of a step by kind of work"
        block = Block(
            heading=f"{run.subject}{hardware}",
            tables=_profile_tables(run),
            pictures=(picture_of(plot_work(kinds, run.subject), f"work-{number}", description),),
            environments=describe_environments(run.operators),
        )
        yield Answer(block, [*_operator_rows(run), *_trace_rows(run, record_set.find("step"))])


def _profile_tables(run: ProfileRun) -> tuple[Table, ...]:
    ranges = {record.case["range"] for record in run.operators}
    tables = [work_table(run.operators, run.subject)]
    tables.extend(
        operator_table(run.operators, run.subject, phase)
        for phase in ("forward", "backward")
        if phase in ranges
    )
    if "attention_softmax" in ranges:
        tables.append(attention_table(run.operators, run.subject))
    # GPU traces list kernels, whose FLOPs are unknown. The matmuls inside fused attention are not
    # traced as matmuls, so ranges with fused attention are left out.
    expected = [
        record
        for record in run.expected
        if not _traced_s(run, str(record.case["range"]), OpClass.ATTENTION)
    ]
    flops = flops_table([*run.operators, *expected])
    return (*tables, flops) if flops.rows else tuple(tables)


def _operator_rows(run: ProfileRun) -> Iterator[Row]:
    for phase in ("forward", "backward"):
        if _traced_s(run, phase):
            yield row(
                "longest_operator",
                numbers_of(run.in_range(phase, of_kinds=False)[0]),
                phase=phase.capitalize(),
                matmul_share=_matmul_share(run, phase),
                all_matmul_share=_matmul_share(run, EVERYWHERE),
            )


def _matmul_share(run: ProfileRun, phase: str) -> float:
    return _traced_s(run, phase, OpClass.MATMUL) / _traced_s(run, phase)


def _trace_rows(run: ProfileRun, stopwatch: Sequence[Record]) -> Iterator[Row]:
    softmax_s = _traced_s(run, "attention_softmax")
    parts = [_traced_s(run, f"attention_{name}", OpClass.MATMUL) for name in ("scores", "values")]
    head_dim, num_layers = (_model_field(run, name) for name in ("head_dim", "num_layers"))
    if softmax_s and all(parts) and head_dim:
        per_score = _SCORE_OPERATIONS * head_dim
        yield row(
            "softmax_to_matmuls",
            softmax_s=softmax_s,
            matmul_s=sum(parts),
            time_ratio=softmax_s / sum(parts),
            softmax_operations=_SOFTMAX_OPERATIONS,
            matmul_operations=per_score,
            operation_ratio=softmax_s / sum(parts) * per_score / _SOFTMAX_OPERATIONS,
        )
    # One torch matmul may launch several kernels, so matmul kernels of GPU traces do not count.
    calls = sum(
        record.metrics["num_calls"].value
        for record in run.in_range("forward", of_kinds=False)
        if record.case["operator"] == "aten::mm"
    )
    timed = [record for record in stopwatch if _is_same_step(run, record)]
    newest = max(timed, key=lambda record: record.environment.time, default=None)
    yield row(
        "trace_against_expectation",
        numbers_of(newest),
        num_matmuls=calls or None,
        expected_num_matmuls=num_layers and _MATMULS_PER_LAYER * num_layers + 1,
        traced_step_time_s=step_seconds(run.steps[-1]) if run.steps else None,
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


def _traced_s(run: ProfileRun, name: str, work: OpClass | None = None) -> float:
    """Returns the time of a range, or of one kind of work in the range."""
    return sum(
        own_time_s(record)
        for record in run.in_range(name, of_kinds=True)
        if work is None or record.case["work"] == work
    )


def peak_memory(record_set: RecordSet) -> Iterator[Answer]:
    """Yields memory over a step by category, for each context, phase and precision."""
    predictions = [each for each in record_set.predictions("memory_timeline") if each.metrics]
    expected = {join_key(record) for record in predictions}
    found = [
        record
        for record in record_set.find("memory_timeline")
        if join_key(record) in expected and record.metrics
    ]
    for group in comparable_groups(found, ("phase", "context", "precision")):
        ordered = sorted(group, key=_memory_order)
        drawn = _drawn(ordered)
        allocations = _allocations(record_set, [*drawn[::-1], *ordered[::-1]])
        tables = [memory_table([*ordered, *predictions])]
        tables += [records_table(allocations)] if allocations else []
        known = [record for record in ordered if record.metrics["peak_bytes"].value]
        full = [record for record in known if record.case["precision"] == "float32"]
        longest = {record.case["phase"]: record for record in full}
        shortest = {record.case["phase"]: record for record in reversed(full)}
        pairs = [(longest[phase], shortest[phase]) for phase in longest]
        pairs += pairs_with_base(known, "precision", "float32", _phase_and_context)
        rows = [_memory_row(*pair) for pair in pairs]
        yield measured_answer(group, rows, {"memory-timeline": drawn}, tables)


def _memory_order(record: Record) -> tuple[bool, str, float]:
    case = record.case
    return case["precision"] != "float32", str(case["phase"]), case_number(record, "context")


def _drawn(ordered: Sequence[Record]) -> list[Record]:
    """Returns the records of one precision at the context with most phases, the longest of these.

    That precision is float32 if there is any.
    """
    precision = ordered[0].case["precision"]
    by_context: dict[float, list[Record]] = {}
    for record in ordered:
        if record.case["precision"] == precision:
            by_context.setdefault(case_number(record, "context"), []).append(record)
    return max(by_context.items(), key=lambda item: (len(item[1]), item[0]))[1]


def _allocations(record_set: RecordSet, records: Sequence[Record]) -> list[Record]:
    """Returns the largest allocations of the first step that has allocation records."""
    for record in records:
        found = [
            allocation
            for allocation in record_set.find("allocation", subject=step_subject(record.case))
            if same_run(allocation, record) and allocation.metrics
        ]
        if found:
            return sorted(found, key=lambda each: case_number(each, "number"))[:_LARGEST_SHOWN]
    return []


def _phase_and_context(record: Record) -> tuple[CaseValue, CaseValue]:
    return record.case["phase"], record.case["context"]


def _memory_row(record: Record, base: Record) -> Row:
    """Returns a peak, that of a base, and the part in which they differ most."""
    parts, before = (
        {part: each.metrics[f"{part}_at_peak_bytes"].value for part in _MEMORY_PARTS}
        for each in (record, base)
    )
    changed = max(parts, key=lambda part: abs(parts[part] - before[part]))
    return row(
        "peak_memory",
        numbers_of(record),
        numbers_of(base, "base_"),
        changed=changed.replace("_", " "),
        changed_bytes=parts[changed],
        base_changed_bytes=before[changed],
    )
