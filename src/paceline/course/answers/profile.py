"""Answers from traces of a step: time by kind of work, and memory by category."""

from collections.abc import Sequence

from paceline.accounting import saved_for_backward_bytes, step_memory
from paceline.core.presets import model_preset
from paceline.core.specs import BatchShape, precision_preset
from paceline.core.units import format_binary_bytes
from paceline.course.answers.block import measured_block
from paceline.course.findings.memory import memory_findings
from paceline.course.findings.operators import comparable_flops, operator_findings
from paceline.course.findings.template import make_finding
from paceline.records import Record, join_key
from paceline.reports.document.model import Block
from paceline.reports.document.pictures import picture_of
from paceline.reports.evidence.fields import case_number
from paceline.reports.evidence.groups import Evidence, comparable_groups
from paceline.reports.evidence.profile_runs import ProfileRun, find_profile_runs, subject_of
from paceline.reports.evidence.provenance import describe_environments, describe_topology, same_run
from paceline.reports.plots.operators import plot_work
from paceline.reports.tables.profile import (
    attention_table,
    flops_table,
    memory_table,
    operator_table,
    work_table,
)
from paceline.reports.tables.table import Table, records_table
from paceline.traces.records import ALL_OPERATORS

_COURSE_MODEL = "2.7B"
_COURSE_BATCH = 4
_COURSE_CONTEXTS = (128, 256, 512)
_LARGEST_SHOWN = 6


def answer_profile(evidence: Evidence) -> tuple[Block, ...]:
    """Returns the time of a forward pass and of a whole training step by kind of work."""
    blocks: list[Block] = []
    for run in find_profile_runs(evidence):
        if not run.in_range("forward", of_kinds=False):
            continue
        kinds = [each for each in run.operators if each.case["operator"] == ALL_OPERATORS]
        place = "" if run.memory is None else f"; {describe_topology(run.memory)}"
        picture = picture_of(
            plot_work(kinds, run.subject),
            f"work-{len(blocks)}",
            "Time of each phase of a step by kind of work",
        )
        blocks.append(
            Block(
                heading=f"{run.subject}{place}",
                tables=_profile_tables(run),
                pictures=(picture,),
                findings=tuple(operator_findings(run, evidence.find("step"))),
                environments=describe_environments(run.operators),
            )
        )
    return tuple(blocks)


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
    expected = comparable_flops(run)
    if expected:
        tables.append(flops_table([*run.operators, *expected]))
    return tuple(tables)


def answer_memory(evidence: Evidence) -> tuple[Block, ...]:
    """Returns memory over a step by category, for each context, phase and precision."""
    blocks = []
    predictions = [each for each in evidence.predictions("memory_timeline") if each.metrics]
    expected = {join_key(record) for record in predictions}
    joined = [
        record
        for record in evidence.find("memory_timeline")
        if join_key(record) in expected and record.metrics
    ]
    groups = comparable_groups(joined, ("phase", "context", "precision"))
    for number, group in enumerate(groups):
        ordered = sorted(
            group,
            key=lambda record: (
                str(record.case["precision"]) != "float32",
                str(record.case["phase"]),
                case_number(record, "context"),
            ),
        )
        drawn = _drawn(ordered)
        allocations = _allocations(evidence, [*drawn[::-1], *ordered[::-1]])
        tables = [memory_table([*ordered, *predictions])]
        if allocations:
            tables.append(records_table(allocations))
        description = "Memory over a step, stacked by category"
        drawing = ("memory-timeline", drawn, f"memory-timeline-{number}", description)
        findings = memory_findings(ordered, allocations)
        blocks.append(measured_block(group, tables, [drawing], findings))
    return tuple(blocks)


def _drawn(records: Sequence[Record]) -> list[Record]:
    """Returns the records to draw: those of the context with most phases, the longest on a tie.

    Only float32 records are considered if there are any.
    """
    full = [record for record in records if record.case["precision"] == "float32"] or list(records)
    by_context: dict[float, list[Record]] = {}
    for record in full:
        by_context.setdefault(case_number(record, "context"), []).append(record)
    return max(by_context.items(), key=lambda item: (len(item[1]), item[0]))[1]


def _allocations(evidence: Evidence, records: Sequence[Record]) -> list[Record]:
    """Returns the largest allocations of the first step that has allocation records."""
    for record in records:
        found = [
            allocation
            for allocation in evidence.find("allocation", subject=subject_of(record))
            if same_run(allocation, record) and allocation.metrics
        ]
        if found:
            return sorted(found, key=lambda each: case_number(each, "number"))[:_LARGEST_SHOWN]
    return []


def calculate_memory(_evidence: Evidence) -> tuple[Block, ...]:
    """Calculates the memory of the courses' model, which is too large for most machines."""
    shape = model_preset(_COURSE_MODEL)
    precision = precision_preset("float32")
    sizes = []
    for context in _COURSE_CONTEXTS:
        batch = BatchShape(num_sequences=_COURSE_BATCH, context_length=context)
        step = step_memory(shape, batch, precision, "none", 1, attention="naive")["before_step"]
        sizes.append(
            {
                "residual stream": 4 * batch.tokens_per_pass * shape.d_model,
                "scores of a layer": 4 * _COURSE_BATCH * shape.num_heads * context**2,
                "saved for backward": saved_for_backward_bytes(shape, batch, attention="naive"),
                "states and gradients": step.total - step.activations,
                "peak of a training step": step.total,
            }
        )
    first, last = sizes[0], sizes[-1]
    findings = (
        make_finding(
            "residual_stream",
            "A tensor of the residual stream is 4 · batch · context · d_model bytes, {first_bytes} "
            "at context {first_context}.",
            first_context=_COURSE_CONTEXTS[0],
            first_bytes=first["residual stream"],
        ),
        make_finding(
            "peak_by_context",
            "Peak memory grows from {first_bytes} at context {first_context} to {last_bytes} at "
            "context {last_context}. A profile with the same peak at every context shows only the "
            "first step, in which the optimizer allocates its moments after the activations are "
            "freed.",
            first_context=_COURSE_CONTEXTS[0],
            first_bytes=first["peak of a training step"],
            last_context=_COURSE_CONTEXTS[-1],
            last_bytes=last["peak of a training step"],
        ),
        make_finding(
            "largest_allocation",
            "At context {context}, the attention scores of one layer take {scores_bytes} and a "
            "SwiGLU weight matrix takes {matrix_bytes}.",
            context=_COURSE_CONTEXTS[-1],
            scores_bytes=last["scores of a layer"],
            matrix_bytes=4 * shape.d_model * shape.d_ff,
        ),
    )
    table = Table(
        headers=("context", *first),
        rows=tuple(
            (str(context), *(format_binary_bytes(size) for size in row.values()))
            for context, row in zip(_COURSE_CONTEXTS, sizes, strict=True)
        ),
        caption="one rank, attention that stores its scores, second step and later",
    )
    heading = f"{_COURSE_MODEL}, batch {_COURSE_BATCH}, float32, calculated"
    return (Block(heading=heading, tables=(table,), findings=findings),)
