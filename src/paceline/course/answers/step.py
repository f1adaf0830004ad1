"""What records of training steps answer: time by model, warm-up, number format, compilation."""

from paceline.course.answers.block import measured_block
from paceline.course.findings.step import is_timed, size_sentences, warmup_sentences
from paceline.course.findings.step_comparisons import (
    compile_sentence,
    pairs_with_base,
    precision_sentences,
)
from paceline.records import CaseValue, Record
from paceline.records.kinds import MODEL_FIELDS
from paceline.reports.document.model import Block
from paceline.reports.document.pictures import draw_picture
from paceline.reports.evidence.fields import case_number
from paceline.reports.evidence.groups import Evidence, comparable_groups, varies
from paceline.reports.evidence.models import num_parameters
from paceline.reports.tables.table import records_table


def answer_sizes(evidence: Evidence) -> tuple[Block, ...]:
    """Answers how long each phase takes by model."""
    found = _steps(evidence, precision="float32", compile="none")
    blocks = []
    for number, group in enumerate(comparable_groups(found, MODEL_FIELDS)):
        ordered = sorted(group, key=num_parameters)
        timed = [record for record in ordered if record.metrics]
        blocks.append(
            measured_block(
                group,
                tables=(records_table(ordered),),
                pictures=(
                    draw_picture(
                        "step-time",
                        ordered,
                        f"step-time-{number}",
                        "Time of forward, backward and optimizer by model",
                    ),
                ),
                findings=size_sentences(timed),
            )
        )
    return tuple(blocks)


def answer_warmup(evidence: Evidence) -> tuple[Block, ...]:
    """Answers what leaving out the warm-up does."""
    blocks = []
    found = [
        record
        for record in _steps(evidence, compile="none")
        if isinstance(record.case.get("warmup"), int)
    ]
    for number, group in enumerate(comparable_groups(found, ("warmup",), holds=varies("warmup"))):
        ordered = sorted(group, key=lambda record: case_number(record, "warmup"))
        blocks.append(
            measured_block(
                group,
                tables=(records_table(ordered),),
                pictures=(
                    draw_picture(
                        "warmup",
                        ordered,
                        f"warmup-{number}",
                        "Every sample of the step time by number of warm-up steps",
                    ),
                ),
                findings=warmup_sentences([record for record in ordered if record.metrics]),
            )
        )
    return tuple(blocks)


def answer_precision(evidence: Evidence) -> tuple[Block, ...]:
    """Answers what sixteen bits gain by model."""
    blocks = []
    found = _steps(evidence, compile="none")
    groups = comparable_groups(found, ("precision", *MODEL_FIELDS), holds=varies("precision"))
    for number, group in enumerate(groups):
        ordered = sorted(
            group, key=lambda record: (num_parameters(record), str(record.case["precision"]))
        )
        sentences = precision_sentences([record for record in ordered if record.metrics])
        if sentences:
            blocks.append(
                measured_block(
                    group,
                    tables=(records_table(ordered),),
                    pictures=(
                        draw_picture(
                            "precision",
                            ordered,
                            f"precision-{number}",
                            "Time of forward, backward and optimizer by number format",
                        ),
                    ),
                    findings=sentences,
                )
            )
    return tuple(blocks)


def answer_compiled_step(evidence: Evidence) -> tuple[Block, ...]:
    """Answers what compiling the whole model gains."""
    blocks = []
    found = _steps(evidence)
    groups = comparable_groups(found, ("compile", *MODEL_FIELDS), holds=varies("compile"))
    for number, group in enumerate(groups):
        ordered = sorted(
            (record for record in group if record.metrics),
            key=lambda record: (num_parameters(record), str(record.case["compile"])),
        )
        pairs = pairs_with_base(ordered, "compile", "none")
        if not pairs:
            continue
        in_pairs = {id(record) for pair in pairs for record in pair}
        compared = [record for record in ordered if id(record) in in_pairs]
        blocks.append(
            measured_block(
                group,
                tables=(records_table(compared),),
                pictures=(
                    draw_picture(
                        "step-time",
                        compared,
                        f"compiled-step-{number}",
                        "Time of forward, backward and optimizer, compiled and not",
                    ),
                ),
                findings=(compile_sentence(record, base) for record, base in pairs),
            )
        )
    return tuple(blocks)


def _steps(evidence: Evidence, **fields: CaseValue) -> list[Record]:
    """Returns training steps of known models, with the times of all phases or with none."""
    return [
        record
        for record in evidence.find("step", phase="train", **fields)
        if num_parameters(record) and (is_timed(record) or not record.metrics)
    ]
