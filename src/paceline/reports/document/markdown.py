"""Renders a report as Markdown with SVG files, for a repository or a pull request."""

import html
import pathlib
import re

from paceline.reports.document.model import AnsweredPart, Block, Report, Section
from paceline.reports.tables.table import Table, render_markdown

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
