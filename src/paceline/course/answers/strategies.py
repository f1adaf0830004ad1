"""Answers from data-parallel benchmarks: the cost of each way to average gradients."""

from collections.abc import Sequence

from paceline.course.answers.block import drawn_blocks, measured_block
from paceline.course.findings.overhead import find_overhead, overhead_findings
from paceline.course.findings.strategies import (
    flat_findings,
    naive_findings,
    overlap_findings,
    trace_findings,
)
from paceline.course.findings.template import make_finding
from paceline.records import Record
from paceline.records.kinds import MEASURED_LINK_RATE, PREDICTS
from paceline.reports.document.model import Block
from paceline.reports.document.pictures import picture_of
from paceline.reports.evidence.fields import strategy_text
from paceline.reports.evidence.groups import Evidence, comparable_groups
from paceline.reports.evidence.strategies import (
    EXPOSED,
    OVER,
    STRATEGIES,
    exposed_seconds,
    has_peers,
    of_strategies,
    strategy_groups,
)
from paceline.reports.plots.diagrams.overlap import plot_designs
from paceline.reports.tables.table import records_table

_PHASES = {"strategies": "Phases of a training step by strategy"}
_SIZES = {"bucket-size": "Exposed communication by bucket size, measured and predicted"}


def explain_equality(_evidence: Evidence) -> tuple[Block, ...]:
    """Returns the command and test that show equality with training in one process."""
    finding = make_finding(
        "equality_with_one_process",
        "python course/benchmark_naive_ddp.py --model toy trains a toy model for ten steps with "
        "different data on each rank, then compares its weights with the weights of one process "
        "that has seen all the data. tests/distributed/test_data_parallel.py does the same for "
        "every strategy, with frozen and tied parameters, gradient accumulation, and ranks that "
        "begin with different weights.",
    )
    return (Block(heading="Equality with one process", findings=(finding,)),)


def answer_naive(evidence: Evidence) -> tuple[Block, ...]:
    """Returns the cost of one all-reduce per parameter."""
    groups = strategy_groups(evidence, "naive")
    shown = [of_strategies(group, "none", "naive") for group in groups]
    return drawn_blocks(shown, naive_findings, name="naive", plots=_PHASES)


def answer_flat(evidence: Evidence) -> tuple[Block, ...]:
    """Returns the gain of one all-reduce for all gradients over one per parameter."""
    groups = strategy_groups(evidence, "naive", "flat")
    shown = [of_strategies(group, "naive", "flat") for group in groups]
    return drawn_blocks(shown, flat_findings, name="flat", plots=_PHASES)


def answer_overlap(evidence: Evidence) -> tuple[Block, ...]:
    """Returns the gain of overlapping communication with backward, per parameter and per bucket."""
    blocks = []
    for number, group in enumerate(strategy_groups(evidence, "bucketed")):
        shown = of_strategies(group, *STRATEGIES)
        predictions = _predictions(evidence, group)
        plots = {"strategies": shown}
        sizes = {record.case["bucket_size_mb"] for record in shown}
        if len(sizes - {None, "auto"}) > 1:
            plots["bucket-size"] = [*shown, *predictions]
        drawings = [
            (plot, drawn, f"{plot}-{number}", (_PHASES | _SIZES)[plot])
            for plot, drawn in plots.items()
        ]
        findings = overlap_findings(shown, predictions)
        blocks.append(measured_block(group, [records_table(shown)], drawings, findings))
    return tuple(blocks)


def _predictions(evidence: Evidence, group: Sequence[Record]) -> list[Record]:
    """Returns predictions for the same steps with any strategy and bucket size."""
    case = group[0].case
    return [
        record
        for record in evidence.predictions("ddp")
        if EXPOSED in record.metrics
        and all(
            value == case.get(field)
            for field, value in record.case.items()
            if field not in (*OVER, PREDICTS, MEASURED_LINK_RATE)
        )
    ]


def answer_traces(evidence: Evidence) -> tuple[Block, ...]:
    """Returns timelines of one step of each strategy on a common time axis."""
    blocks = []
    found = [record for record in evidence.find("timeline") if has_peers(record)]
    for number, group in enumerate(comparable_groups(found, (*OVER, "rank"))):
        measured = [record for record in group if record.metrics]
        predictions = evidence.predictions_for("timeline", measured)
        # On other ranks, messages appear longer: they include the wait for the slowest rank.
        waits_least = {
            strategy_text(record): record
            for record in sorted(measured, key=exposed_seconds, reverse=True)
        }
        description = "Compute and communication of every rank in one step, by strategy"
        drawing = ("timelines", [*measured, *predictions], f"timelines-{number}", description)
        findings = trace_findings(waits_least)
        blocks.append(measured_block(group, [records_table(measured)], [drawing], findings))
    return tuple(blocks)


def calculate_overhead(evidence: Evidence) -> tuple[Block, ...]:
    """Calculates the overhead and best bucket size, from measurements if available."""
    overhead = find_overhead(evidence)
    description = "Four ways to average gradients, simulated with the overlap recurrence"
    return (
        Block(
            heading=f"With {overhead.source}",
            working=overhead.working,
            pictures=(picture_of(plot_designs(), "data-parallel-designs", description),),
            findings=tuple(overhead_findings(overhead)),
        ),
    )
