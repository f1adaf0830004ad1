"""From a store's records to a report: a pure function, which measures nothing."""

import logging
import pathlib
from collections.abc import Sequence

from paceline.course.deliverables import DELIVERABLES, Deliverable
from paceline.records import CaseValue, Record
from paceline.records.kinds import ATTEMPT, PREDICTION
from paceline.reports.document.model import AnsweredPart, Report, Section
from paceline.reports.evidence.groups import Evidence
from paceline.reports.evidence.provenance import describe_machines
from paceline.workflows.cases import SEPARATOR, is_partial

_logger = logging.getLogger(__name__)


def build_report(records: Sequence[Record], runs: pathlib.Path | None = None) -> Report:
    """Answers every deliverable from records.

    Args:
        records: All of a store.
        runs: A file of training runs for the scaling-law question; made-up runs by default.
    """
    evidence = Evidence.of(records, runs)
    sections = tuple(_section(deliverable, evidence) for deliverable in DELIVERABLES)
    parts = [part for section in sections for part in section.parts]
    answered = sum(bool(part.blocks) for part in parts)
    measured = [each for each in evidence.records if each.kind not in (ATTEMPT, PREDICTION)]
    machines = describe_machines(measured)
    return Report(
        title="Data-parallel training, measured and explained",
        summary=(
            f"{answered} of {len(parts)} questions are answered, from {len(measured)} "
            "measurements and by calculation. What is not measured says so, with the command that "
            "measures it.",
            *(f"Measured on {machine}." for machine in machines),
        ),
        sections=sections,
    )


def _section(deliverable: Deliverable, evidence: Evidence) -> Section:
    attempts = _unsuccessful(deliverable.name, evidence)
    parts, failures = [], [_describe(each) for each in attempts if not is_partial(each)]
    for part in deliverable.parts:
        try:
            blocks = part.answer(evidence)
        except Exception as error:
            # Whoever has measured for hours must not lose the page to one odd record.
            _logger.exception("%s, %s: no answer could be made", deliverable.name, part.title)
            blocks = ()
            failures.append(f"{part.title}: no answer could be made of the records: {error!r}")
        parts.append(
            AnsweredPart(
                title=part.title, question=part.question, blocks=blocks, commands=part.commands
            )
        )
    return Section(
        name=deliverable.name,
        title=deliverable.title,
        parts=tuple(parts),
        failures=tuple(failures),
        incomplete=tuple(_describe(each) for each in attempts if is_partial(each)),
    )


def _unsuccessful(name: str, evidence: Evidence) -> list[Record]:
    """Returns the last attempts to measure a deliverable that failed or measured only a part."""
    last: dict[CaseValue, Record] = {}
    for record in evidence.find(ATTEMPT):
        # Machines of several kinds run cases of one name by different commands.
        command = record.case["command"]
        if command not in last or record.environment.time >= last[command].environment.time:
            last[command] = record
    return [
        record
        for record in last.values()
        if record.outcome != "ok" and name in str(record.case["deliverables"]).split(SEPARATOR)
    ]


def _describe(attempt: Record) -> str:
    return f"{attempt.case['command']}: {attempt.outcome}: {attempt.reason}"
