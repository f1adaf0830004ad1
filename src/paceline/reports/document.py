"""Reports and pages as trees of blocks, rendered as HTML or as Markdown with SVG files.

The parts are plain data: sections, questions, and blocks of tables and findings. The renderers
decide how they look. In HTML, pictures are embedded as data, and the inline style is allowed by its
hash. All text is escaped. The content security policy in the page's head forbids everything else,
so that a malicious name in a record is harmless even if escaping fails. Pictures are reproducible
byte for byte.
"""

import base64
import dataclasses
import hashlib
import html
import io
import pathlib
import re
from collections.abc import Sequence
from importlib import resources

import matplotlib
import msgspec
from matplotlib.figure import Figure

from paceline.accounting.explanation import Explanation
from paceline.core.finding import Finding
from paceline.records import Record
from paceline.reports.plots.registry import draw
from paceline.reports.tables.table import Table, render_markdown


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


def render_html(report: Report) -> str:
    """Renders a report."""
    return _render("report.html.jinja", report=report)


def render_page(page: Page) -> str:
    """Renders a page about one subject, such as a run."""
    return _render("page.html.jinja", page=page)


def _render(template: str, **document: Page | Report) -> str:
    import jinja2

    files = resources.files("paceline.reports") / "templates"
    style = files.joinpath("report.css").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: files.joinpath(name).read_text(encoding="utf-8")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode("ascii")
    # The content security policy allows the inline style by this hash.
    style_hash = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode("ascii")
    return environment.get_template(template).render(style=style, style_hash=style_hash, **document)


_PICTURES = "figures"
# Characters that Markdown reads as formatting, links or code. Numbers and prose rarely use them.
_SPECIAL = re.compile(r"([\\`*_\[\]#])")


def write_markdown(report: Report, directory: pathlib.Path) -> pathlib.Path:
    """Writes report.md and its pictures, and returns the path of report.md."""
    pictures = directory / _PICTURES
    pictures.mkdir(parents=True, exist_ok=True)
    for section in report.sections:
        for part in section.parts:
            for block in part.blocks:
                for picture in block.pictures:
                    (pictures / f"{picture.name}.svg").write_bytes(picture.svg)
    path = directory / "report.md"
    path.write_text(render_report(report), encoding="utf-8")
    return path


def render_report(report: Report) -> str:
    """Renders the Markdown text, which links to pictures in a subdirectory."""
    lines = [f"# {_text(report.title)}", ""]
    for sentence in report.summary:
        lines += [_text(sentence), ""]
    if report.key_findings:
        lines += ["Key findings:", ""]
        for section, finding in report.key_findings:
            lines.append(f"- **{_text(section.title)}.** {_text(finding.message)}")
        lines.append("")
    for number, section in enumerate(report.sections, start=1):
        lines += _section_lines(number, section)
    return "\n".join(lines).rstrip("\n") + "\n"


def _section_lines(number: int, section: Section) -> list[str]:
    lines = [f"## {number}. {_text(section.title)}", "", f"`{section.name}`", ""]
    for part in section.parts:
        lines += _part_lines(part)
    attempts = {"Failed runs:": section.failures, "Incomplete runs:": section.incomplete}
    for title, runs in attempts.items():
        if runs:
            lines += [title, "", *(f"- {_text(run)}" for run in runs), ""]
    return lines


def _part_lines(part: AnsweredPart) -> list[str]:
    lines = [f"### {_text(part.title)}", "", f"_{_text(part.question)}_", ""]
    if not part.blocks:
        lines += ["Not measured yet. To measure it, run:", "", "```console"]
        lines += [*(f"$ {command}" for command in part.commands), "```", ""]
    for block in part.blocks:
        lines += _block_lines(block)
    return lines


def _block_lines(block: Block) -> list[str]:
    lines = [f"#### {_text(block.heading)}", ""] if block.heading else []
    for working in block.working:
        lines += ["```text", working.render(), "```", ""]
    for table in block.tables:
        lines += [render_markdown(_escaped(table)), ""]
    for picture in block.pictures:
        description = _text(picture.description)
        lines += [f"![{description}]({_PICTURES}/{picture.name}.svg)", ""]
    if block.listing:
        lines += ["```text", block.listing, "```", ""]
    lines += [f"- {_text(finding.text)}" for finding in block.findings]
    lines += [""] if block.findings else []
    for environment in block.environments:
        lines += [f"Measured on {_text(environment)}", ""]
    return lines


def _escaped(table: Table) -> Table:
    return Table(
        headers=tuple(_text(header) for header in table.headers),
        rows=tuple(tuple(_text(cell) for cell in row) for row in table.rows),
        caption=_text(table.caption),
        notes=tuple(_text(note) for note in table.notes),
    )


def _text(text: str) -> str:
    """Escapes text for Markdown and for HTML, which Markdown passes through."""
    one_line = " ".join(text.split())
    return html.escape(_SPECIAL.sub(r"\\\1", one_line), quote=False)


def draw_picture(plot: str, records: Sequence[Record], name: str, description: str) -> Picture:
    """Draws one of `paceline.reports.plots.registry.PLOTS`."""
    return picture_of(draw(plot, [_plain(record) for record in records]), name, description)


def picture_of(figure: Figure, name: str, description: str) -> Picture:
    """Converts a figure to an SVG picture."""
    output = io.BytesIO()
    # Without these settings, dates and random identifiers would make every file different.
    with matplotlib.rc_context({"svg.hashsalt": f"paceline {name}"}):
        figure.savefig(output, format="svg", metadata={"Date": None})
    return Picture(name=name, description=description, svg=output.getvalue())


def _plain(record: Record) -> Record:
    """Escapes dollar signs in names, which matplotlib would parse as the start of a formula."""
    case = {
        field: value.replace("$", r"\$") if isinstance(value, str) else value
        for field, value in record.case.items()
    }
    return msgspec.structs.replace(record, case=case)
