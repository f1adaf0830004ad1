"""What a report or a page consists of: sections, their parts, and blocks of findings.

Plain data: how it looks is decided by whoever renders it.
"""

import dataclasses

from paceline.accounting.explanation import Explanation
from paceline.core.finding import Finding
from paceline.reports.tables.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawing and what it shows."""

    name: str
    """File name without ending, unique in a report."""
    description: str
    """What a reader who cannot see it needs to know."""
    svg: bytes
    """The drawing, complete in itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """What one set of comparable records, or a calculation, says of a question."""

    heading: str = ""
    """Where it was measured, or what was calculated."""
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    working: tuple[Explanation, ...] = ()
    listing: str = ""
    """A file or a text, line by line as it is."""
    findings: tuple[Finding, ...] = ()
    """What the figures of the block say."""
    environments: tuple[str, ...] = ()
    """The machines and software that the figures come from."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnsweredPart:
    """One question of a deliverable, with what is known of it."""

    title: str
    question: str
    blocks: tuple[Block, ...]
    """Empty where nothing was measured."""
    commands: tuple[str, ...]
    """What measures it; none for what is calculated."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """One deliverable."""

    name: str
    """As the courses call it."""
    title: str
    parts: tuple[AnsweredPart, ...]
    failures: tuple[str, ...] = ()
    """Failed runs of what measures it, with the reasons."""
    incomplete: tuple[str, ...] = ()
    """Runs that measured only a part, with the reasons."""

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
    """What to read first, each with the section that it is from."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chapter:
    """One aspect of what a page is about."""

    title: str
    blocks: tuple[Block, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """What there is to see of one thing, such as a run."""

    title: str
    summary: tuple[str, ...]
    chapters: tuple[Chapter, ...]
