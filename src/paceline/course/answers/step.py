"""Answers from step benchmarks: time by model, warm-up, precision and compilation."""

from collections.abc import Sequence

from paceline.course.answers.block import drawn_blocks
from paceline.course.findings.step import (
    PHASES,
    compile_findings,
    precision_findings,
    size_findings,
    warmup_findings,
)
from paceline.records import CaseValue, Record
from paceline.records.kinds import MODEL_FIELDS
from paceline.reports.document.model import Block
from paceline.reports.evidence.fields import case_number
from paceline.reports.evidence.groups import Evidence, comparable_groups, varies
from paceline.reports.evidence.models import num_parameters


def answer_sizes(evidence: Evidence) -> tuple[Block, ...]:
    """Returns the time of each phase by model."""
    found = _steps(evidence, precision="float32", compile="none")
    groups = [sorted(each, key=num_parameters) for each in comparable_groups(found, MODEL_FIELDS)]
    plots = {"step-time": "Time of forward, backward and optimizer by model"}
    return drawn_blocks(groups, size_findings, name="sizes", plots=plots)


def answer_warmup(evidence: Evidence) -> tuple[Block, ...]:
    """Returns the effect of the number of warm-up steps on measured step times."""
    found = [
        record
        for record in _steps(evidence, compile="none")
        if isinstance(record.case.get("warmup"), int)
    ]
    groups = [
        sorted(group, key=lambda record: case_number(record, "warmup"))
        for group in comparable_groups(found, ("warmup",), holds=varies("warmup"))
    ]
    plots = {"warmup": "Every sample of the step time by number of warm-up steps"}
    return drawn_blocks(groups, warmup_findings, name="steps", plots=plots)


def answer_precision(evidence: Evidence) -> tuple[Block, ...]:
    """Returns the speedup of bf16 and fp16 over float32 by model."""
    groups = _groups_over("precision", _steps(evidence, compile="none"))
    plots = {"precision": "Time of forward, backward and optimizer by precision"}
    return drawn_blocks(groups, precision_findings, name="steps", plots=plots)


def answer_compiled_step(evidence: Evidence) -> tuple[Block, ...]:
    """Returns the speedup of compiling the whole model."""
    groups = _groups_over("compile", _steps(evidence))
    plots = {"step-time": "Time of forward, backward and optimizer, compiled and not"}
    return drawn_blocks(groups, compile_findings, name="compiled", plots=plots)


def _groups_over(field: str, records: Sequence[Record]) -> list[list[Record]]:
    """Returns groups that differ only in the model and `field`, sorted by model size."""
    groups = comparable_groups(records, (field, *MODEL_FIELDS), holds=varies(field))
    return [
        sorted(group, key=lambda record: (num_parameters(record), str(record.case[field])))
        for group in groups
    ]


def _steps(evidence: Evidence, **fields: CaseValue) -> list[Record]:
    """Returns training steps of models with known dimensions: fully timed ones and failures."""
    return [
        record
        for record in evidence.find("step", phase="train", **fields)
        if num_parameters(record) and (_is_timed(record) or not record.metrics)
    ]


def _is_timed(record: Record) -> bool:
    times = [record.metrics.get(f"{phase}_time_s") for phase in PHASES]
    return all(time is not None and time.value > 0 for time in times)
