"""A block of findings about records that were measured together."""

from collections.abc import Iterable, Sequence

from paceline.core.finding import Finding
from paceline.records import Record
from paceline.reports.document.model import Block, Picture
from paceline.reports.evidence.provenance import describe_environments, describe_topology
from paceline.reports.tables.table import Table


def measured_block(
    group: Sequence[Record],
    *,
    tables: Iterable[Table],
    findings: Iterable[Finding | str],
    pictures: Iterable[Picture] = (),
) -> Block:
    """Says where records of one place were measured, and with what, around what they show."""
    return Block(
        heading=describe_topology(group[0]),
        tables=tuple(tables),
        pictures=tuple(pictures),
        findings=tuple(findings),
        environments=describe_environments(group),
    )
