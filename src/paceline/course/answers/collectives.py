"""Answers from collective benchmarks: throughput by size and ranks, against the link rate."""

from collections.abc import Sequence

from paceline.course.answers.block import measured_block
from paceline.course.findings.collectives import all_reduce_findings, ranks_and_threads
from paceline.records import Record
from paceline.records.kinds import LINK_SHAPE
from paceline.reports.document.model import Block
from paceline.reports.evidence.fields import case_number
from paceline.reports.evidence.groups import Evidence, comparable_groups, varies
from paceline.reports.evidence.strategies import has_peers
from paceline.reports.tables.table import records_table

_OVER = ("size_bytes", "world_size", "threads")
_FITTED = ("device", "hardware", "num_hosts", "backend", "dtype", *LINK_SHAPE)
"""Case fields that a fit shares with the records it was fitted to."""


def answer_all_reduce(evidence: Evidence) -> tuple[Block, ...]:
    """Returns the throughput of all-reduce by message size and number of ranks."""
    blocks = []
    found = [each for each in evidence.find("comm", operation="all_reduce") if has_peers(each)]
    groups = comparable_groups(found, _OVER, holds=varies("size_bytes"))
    for number, group in enumerate(groups):
        ordered = sorted(
            group,
            key=lambda each: (case_number(each, "world_size"), case_number(each, "size_bytes")),
        )
        fits = _fits(evidence, group)
        description = "Algorithm bandwidth of all-reduce by message size, with the link's rate"
        tables = [records_table(each) for each in (ordered, fits) if each]
        drawing = ("communication", ordered, f"communication-{number}", description)
        findings = all_reduce_findings(ordered, fits)
        blocks.append(measured_block(group, tables, [drawing], findings))
    return tuple(blocks)


def _fits(evidence: Evidence, group: Sequence[Record]) -> list[Record]:
    ranks = {ranks_and_threads(record) for record in group}
    fields = {field: group[0].case.get(field) for field in _FITTED}
    return [
        record
        for record in evidence.find("collective_fit", operation="all_reduce", **fields)
        if record.metrics and ranks_and_threads(record) in ranks
    ]
