"""The parts of a report or a page: sections, questions, and blocks of tables and findings.

These are plain data. The renderers decide how they look.
"""

import dataclasses

from paceline.accounting.explanation import Explanation
from paceline.core.finding import Finding
from paceline.reports.tables.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """An SVG image with a description."""

    name: str
    """File name without extension, unique in a report."""
    description: str
    """Alternative text."""
    svg: bytes
    """A self-contained SVG file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """The answer to a question from one group of comparable records or from a calculation."""

    heading: str = ""
    """The hardware of the measurement, or the subject of the calculation."""
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    working: tuple[Explanation, ...] = ()
    listing: str = ""
    """Preformatted text, such as a file."""
    findings: tuple[Finding, ...] = ()
    """Conclusions from the figures of the block."""
    environments: tuple[str, ...] = ()
    """Machines and software that produced the figures."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnsweredPart:
    """One question of a deliverable, with its answers."""

    title: str
    question: str
    blocks: tuple[Block, ...]
    """Empty if nothing was measured."""
    commands: tuple[str, ...]
    """Commands that measure the answer; empty if it is calculated."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """One deliverable."""

    name: str
    """Name in the course hand-outs."""
    title: str
    parts: tuple[AnsweredPart, ...]
    failures: tuple[str, ...] = ()
    """Failed measurement runs, with reasons."""
    incomplete: tuple[str, ...] = ()
    """Runs that measured only a part, with reasons."""

    @property
    def is_complete(self) -> bool:
        """Whether every part has an answer."""
        return all(part.blocks for part in self.parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All deliverables in order."""

    title: str
    summary: tuple[str, ...]
    sections: tuple[Section, ...]
    key_findings: tuple[tuple[Section, Finding], ...] = ()
    """Findings shown first, each with its section."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chapter:
    """One part of a page."""

    title: str
    blocks: tuple[Block, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """A document about one subject, such as a run."""

    title: str
    summary: tuple[str, ...]
    chapters: tuple[Chapter, ...]
