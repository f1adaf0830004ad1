"""Measures what a report lacks, then writes it."""

import dataclasses
import pathlib
from collections.abc import Sequence

from paceline.course.report import build_report
from paceline.records import Record, RecordStore
from paceline.reports.document.html import render_html
from paceline.reports.document.markdown import write_markdown
from paceline.workflows.cases import SuiteCase
from paceline.workflows.suite import Say, Suite

_WORKSPACE = "suite"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuiltReport:
    """Where a report was written, and what it lacks."""

    paths: tuple[pathlib.Path, ...]
    num_failed: int
    """Cases that were tried and left nothing."""


def measure_and_write(
    store: pathlib.Path,
    directory: pathlib.Path,
    *,
    cases: Sequence[SuiteCase],
    runs: pathlib.Path | None,
    say: Say,
) -> BuiltReport:
    """Runs the cases that the store lacks, and writes the report of all that it holds.

    Args:
        store: JSON Lines file of records.
        directory: Where the report goes.
        cases: What to measure if it is missing; none to measure nothing.
        runs: Training runs for the scaling-law question.
        say: Is told of progress.
    """
    num_failed = 0
    if cases:
        suite = Suite(cases=cases, store=RecordStore(store), workspace=directory / _WORKSPACE)
        num_failed = suite.run(say)
    paths = write_report(list(RecordStore(store).read()), directory, runs)
    return BuiltReport(paths=paths, num_failed=num_failed)


def write_report(
    records: Sequence[Record], directory: pathlib.Path, runs: pathlib.Path | None = None
) -> tuple[pathlib.Path, ...]:
    """Writes a report of records as HTML and Markdown, and returns both paths."""
    report = build_report(records, runs)
    directory.mkdir(parents=True, exist_ok=True)
    page = directory / "report.html"
    page.write_text(render_html(report), encoding="utf-8")
    return page, write_markdown(report, directory)
