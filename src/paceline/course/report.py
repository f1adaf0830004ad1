"""Builds the course report from records and writes it as HTML and Markdown."""

import logging
import pathlib
from collections.abc import Sequence

from paceline.course.answers import Question
from paceline.course.presets import suite_cases
from paceline.course.questions import DELIVERABLES, QUESTIONS
from paceline.course.suite import SEPARATOR, is_partial
from paceline.records import Record
from paceline.records.kinds import ATTEMPT, PREDICTION
from paceline.reports.document import AnsweredPart, Report, Section, render_html, write_markdown
from paceline.reports.record_sets import RecordSet, describe_machines

_logger = logging.getLogger(__name__)
_KEY_FINDINGS = (
    *("step_time", "low_precision", "fastest_attention", "all_reduce", "exposed_communication"),
    *("best_bucket", "sharded_memory", "best_allocation"),
)
"""Findings at the top of the report; the first of each name is used."""
_ON_GPUS = "paceline report build --preset 2gpu --quick"


def write_report(
    records: Sequence[Record], directory: pathlib.Path, runs: pathlib.Path | None = None
) -> tuple[pathlib.Path, ...]:
    """Writes the report as HTML and Markdown and returns both paths."""
    report = build_report(records, runs)
    directory.mkdir(parents=True, exist_ok=True)
    page = directory / "report.html"
    page.write_text(render_html(report), encoding="utf-8")
    return page, write_markdown(report, directory)


def build_report(records: Sequence[Record], runs: pathlib.Path | None = None) -> Report:
    """Returns the report on all deliverables, without running any measurement.

    Without `runs`, the scaling-law question is answered for synthetic runs.
    """
    record_set = RecordSet.of(records, runs)
    sections = tuple(_section(name, record_set) for name in DELIVERABLES)
    parts = [part for section in sections for part in section.parts]
    answered = sum(bool(part.blocks) for part in parts)
    measured = [each for each in record_set.records if each.kind not in (ATTEMPT, PREDICTION)]
    by_name = {
        finding.name: (section, finding)
        for section in reversed(sections)
        for part in reversed(section.parts)
        for block in reversed(part.blocks)
        for finding in reversed(block.findings)
    }
    return Report(
        title="Data-parallel training, measured and explained",
        summary=(
            f"{answered} of {len(parts)} questions are answered, from {len(measured)} "
            "measurements and by calculation. Each question without measurements lists the "
            "commands that measure it.",
            *(f"Measured on {machine}." for machine in describe_machines(measured)),
        ),
        sections=sections,
        key_findings=tuple(
            by_name[name]
            for name in _KEY_FINDINGS
            # The best allocation for synthetic runs is not a measured result.
            if name in by_name and (runs is not None or name != "best_allocation")
        ),
    )


def _section(deliverable: str, record_set: RecordSet) -> Section:
    # The latest attempts that failed, and those that measured only a part.
    failures: list[str] = []
    incomplete: list[str] = []
    parts = []
    for attempt in record_set.find(ATTEMPT):
        names = str(attempt.case["deliverables"]).split(SEPARATOR)
        if attempt.outcome != "ok" and deliverable in names:
            told = incomplete if is_partial(attempt) else failures
            told.append(f"{attempt.case['command']}: {attempt.outcome}: {attempt.reason}")
    for question in QUESTIONS:
        if question.deliverable != deliverable:
            continue
        try:
            blocks = question.answer(record_set)
        except Exception as error:
            # One malformed record must not cost the user a report on hours of measurements.
            _logger.exception("%s, %s: no answer could be made", deliverable, question.title)
            blocks = ()
            failures.append(f"{question.title}: the records could not be evaluated: {error!r}")
        parts.append(
            AnsweredPart(
                title=question.title,
                question=question.asks,
                blocks=blocks,
                commands=commands_for(question),
            )
        )
    return Section(
        name=deliverable,
        title=DELIVERABLES[deliverable],
        parts=tuple(parts),
        failures=tuple(failures),
        incomplete=tuple(incomplete),
    )


def commands_for(question: Question) -> tuple[str, ...]:
    """Returns the commands that measure an answer, on a laptop and on GPUs; none if calculated."""
    if question.kind is None:
        return ()
    on_laptop = [
        case.command + (" --out profile" if case.records_in == "directory" else "")
        for case in suite_cases("laptop", quick=True)
        if question.deliverable in case.deliverables and case.kind == question.kind
    ]
    return (*on_laptop, _ON_GPUS)
