"""Report blocks for groups of comparable records."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from paceline.core.finding import Finding
from paceline.records import Record
from paceline.reports.document.model import Block
from paceline.reports.document.pictures import draw_picture
from paceline.reports.evidence.provenance import describe_environments, describe_topology
from paceline.reports.tables.table import Table, records_table

Drawing: TypeAlias = tuple[str, Sequence[Record], str, str]
"""A picture to draw: plot name, records, picture name, description."""


def measured_block(
    group: Sequence[Record],
    tables: Iterable[Table],
    drawings: Iterable[Drawing],
    findings: Iterable[Finding],
) -> Block:
    """Returns a block with the hardware as its heading and the environments as its footer."""
    return Block(
        heading=describe_topology(group[0]),
        tables=tuple(tables),
        pictures=tuple(draw_picture(*drawing) for drawing in drawings),
        findings=tuple(findings),
        environments=describe_environments(group),
    )


def drawn_blocks(
    groups: Iterable[Sequence[Record]],
    findings: Callable[[Sequence[Record]], Iterable[Finding]],
    *,
    name: str,
    plots: Mapping[str, str],
    table: Callable[[Sequence[Record]], Table] = records_table,
) -> tuple[Block, ...]:
    """Returns one block per group with findings: its table, pictures and findings.

    Picture names begin with `name`. `plots` maps plot names to picture descriptions.
    """
    blocks = []
    for number, group in enumerate(groups):
        found = tuple(findings(group))
        if found:
            drawings = (
                (plot, group, f"{name}-{number}-{plot}", description)
                for plot, description in plots.items()
            )
            blocks.append(measured_block(group, [table(group)], drawings, found))
    return tuple(blocks)
