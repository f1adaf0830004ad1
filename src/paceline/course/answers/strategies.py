"""What records of data-parallel steps answer: what each way to average gradients costs."""

from collections.abc import Sequence

from paceline.core.finding import Finding
from paceline.course.answers.block import measured_block
from paceline.course.findings.overhead import overhead_figures, overhead_findings
from paceline.course.findings.strategies import (
    flat_findings,
    naive_findings,
    overlap_findings,
    trace_findings,
)
from paceline.course.findings.template import make_finding
from paceline.records import Record
from paceline.records.kinds import MEASURED_LINK_RATE, PREDICTION, PREDICTS
from paceline.reports.document.model import Block, Picture
from paceline.reports.document.pictures import draw_picture, picture_of
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


def explain_equality(_evidence: Evidence) -> tuple[Block, ...]:
    """Says how equality with one process is shown."""
    finding = make_finding(
        "equality_with_one_process",
        "python course/benchmark_naive_ddp.py --model toy trains a toy for ten steps on different "
        "data per rank, and then compares its weights with those of one process that has seen all "
        "of it; tests/distributed/test_data_parallel.py does the same for every strategy, with "
        "frozen and tied parameters, accumulation, and ranks that begin with different weights.",
    )
    return (Block(heading="Equality with one process", findings=(finding,)),)


def answer_naive(evidence: Evidence) -> tuple[Block, ...]:
    """Answers what one message per parameter costs."""
    blocks = []
    for number, group in enumerate(strategy_groups(evidence, "naive")):
        *_, naive = shown = of_strategies(group, "none", "naive")
        blocks.append(_block(group, shown, f"naive-{number}", naive_findings(naive, group)))
    return tuple(blocks)


def answer_flat(evidence: Evidence) -> tuple[Block, ...]:
    """Answers what one message for everything gains over one per parameter."""
    blocks = []
    for number, group in enumerate(strategy_groups(evidence, "naive", "flat")):
        naive, flat = shown = of_strategies(group, "naive", "flat")
        blocks.append(_block(group, shown, f"flat-{number}", flat_findings(naive, flat)))
    return tuple(blocks)


def answer_overlap(evidence: Evidence) -> tuple[Block, ...]:
    """Answers what communicating during backward gains, by parameter and by bucket."""
    blocks = []
    for number, group in enumerate(strategy_groups(evidence, "bucketed")):
        shown = of_strategies(group, *STRATEGIES)
        predictions = _predictions(evidence, group)
        findings = overlap_findings(shown, predictions)
        sizes = _bucket_sizes([*shown, *predictions], f"bucket-size-{number}")
        blocks.append(_block(group, shown, f"strategies-{number}", findings, sizes))
    return tuple(blocks)


def _block(
    group: Sequence[Record],
    shown: Sequence[Record],
    name: str,
    findings: Sequence[Finding],
    further: Sequence[Picture] = (),
) -> Block:
    phases = draw_picture("strategies", shown, name, "Phases of a training step by strategy")
    return measured_block(
        group,
        tables=(records_table(shown),),
        pictures=(phases, *further),
        findings=findings,
    )


def _predictions(evidence: Evidence, group: Sequence[Record]) -> list[Record]:
    """Returns what was predicted of the same steps, at any bucket size."""
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


def _bucket_sizes(records: Sequence[Record], name: str) -> list[Picture]:
    sizes = {record.case["bucket_size_mb"] for record in records if record.kind != PREDICTION}
    if len(sizes - {None, "auto"}) < 2:
        return []
    description = "Exposed communication by bucket size, measured and predicted"
    return [draw_picture("bucket-size", records, name, description)]


def answer_traces(evidence: Evidence) -> tuple[Block, ...]:
    """Shows one step of each strategy on one axis of time."""
    blocks = []
    found = [record for record in evidence.find("timeline") if has_peers(record)]
    for number, group in enumerate(comparable_groups(found, (*OVER, "rank"))):
        measured = [record for record in group if record.metrics]
        predictions = evidence.predictions_for("timeline", measured)
        # Others' messages look longer by their wait for the rank that arrives last.
        waits_least = {
            strategy_text(record): record
            for record in sorted(measured, key=exposed_seconds, reverse=True)
        }
        blocks.append(
            measured_block(
                group,
                tables=(records_table(measured),),
                pictures=(
                    draw_picture(
                        "timelines",
                        [*measured, *predictions],
                        f"timelines-{number}",
                        "Computing and messages of every rank in one step, by strategy",
                    ),
                ),
                findings=trace_findings(waits_least),
            )
        )
    return tuple(blocks)


def calculate_overhead(evidence: Evidence) -> tuple[Block, ...]:
    """Works out overhead and best bucket size, with measured numbers where there are any."""
    figures = overhead_figures(evidence)
    return (
        Block(
            heading=f"With numbers that are {figures.source}",
            working=figures.work(),
            pictures=(
                picture_of(
                    plot_designs(),
                    "data-parallel-designs",
                    "Four ways to average gradients, played through the recurrence",
                ),
            ),
            findings=tuple(overhead_findings(figures)),
        ),
    )
