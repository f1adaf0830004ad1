"""What records of sharded training answer: memory at three instants, its parts, and time."""

from collections.abc import Sequence

from paceline.accounting import count_parameters, model_state_bytes
from paceline.core.presets import model_preset
from paceline.core.specs import precision_preset
from paceline.core.strategies import StrategyName
from paceline.core.units import format_binary_bytes
from paceline.course.answers.block import measured_block
from paceline.course.findings.sharding import (
    BASELINE,
    find_baseline,
    memory_findings,
    time_findings,
)
from paceline.course.findings.template import make_finding
from paceline.records import Record
from paceline.reports.document.model import Block
from paceline.reports.document.pictures import draw_picture
from paceline.reports.evidence.fields import strategy_text
from paceline.reports.evidence.groups import Evidence, comparable_groups, includes
from paceline.reports.evidence.strategies import OVER, has_peers, step_seconds
from paceline.reports.tables.table import Table, records_table
from paceline.reports.tables.with_predictions import with_predictions

_SHARDED = "sharded_optimizer"
_MODEL = "xl"
_RANKS = 2
_STAGES: dict[StrategyName, tuple[str, str, str]] = {
    "torch_ddp": ("nothing", "all-reduce", "2 Ψ"),
    "sharded_optimizer": ("optimizer state (ZeRO-1)", "all-reduce, then broadcast", "3 Ψ"),
    "sharded": ("gradients too (ZeRO-2)", "reduce-scatter, then all-gather", "2 Ψ"),
    "fully_sharded": ("parameters too (ZeRO-3)", "reduce-scatter, all-gather twice", "3 Ψ"),
}


def answer_memory(evidence: Evidence) -> tuple[Block, ...]:
    """Answers what sharding saves at each instant, and what the rest is."""
    blocks = []
    found = evidence.find("optimizer")
    groups = comparable_groups(found, OVER, holds=includes("strategy", BASELINE))
    for number, group in enumerate(groups):
        predictions = evidence.predictions_for("optimizer", group)
        joined = with_predictions(group, predictions)
        measured = [record for record in joined if record.metrics]
        picture = draw_picture(
            "optimizer-memory",
            [*measured, *predictions],
            f"optimizer-memory-{number}",
            "Memory of a step by what it holds, measured and predicted",
        )
        blocks.append(
            measured_block(
                group,
                tables=(records_table(joined), records_table(joined, "memory")),
                pictures=(picture,),
                findings=memory_findings(measured),
            )
        )
    return tuple(blocks)


def answer_time(evidence: Evidence) -> tuple[Block, ...]:
    """Answers what sharding does to the time of a step."""
    found = [
        record for record in evidence.find("optimizer") if record.metrics and has_peers(record)
    ]
    return tuple(
        measured_block(group, tables=(_time_table(group),), findings=time_findings(group))
        for group in comparable_groups(found, OVER, holds=includes("strategy", BASELINE, _SHARDED))
    )


def _time_table(records: Sequence[Record]) -> Table:
    baseline = find_baseline(records)
    return Table(
        headers=("strategy", "step (ms)", "optimizer (ms)", "step, to unsharded"),
        rows=tuple(
            (
                strategy_text(record),
                f"{step_seconds(record) * 1e3:.4g}",
                f"{record.metrics['optimizer_time_s'].value * 1e3:.4g}",
                f"{step_seconds(record) / step_seconds(baseline):.3f}",
            )
            for record in records
        ),
        caption=f"{baseline.case['model']}, {baseline.case['world_size']} ranks",
    )


def calculate_states(_evidence: Evidence) -> tuple[Block, ...]:
    """Calculates the states of the courses' model, and the volume of each stage."""
    shape = model_preset(_MODEL)
    states = {
        strategy: model_state_bytes(shape, precision_preset("float32"), strategy, _RANKS)
        for strategy in _STAGES
    }
    totals = {
        strategy: held.parameters + held.gradients + held.optimizer_state
        for strategy, held in states.items()
    }
    return (
        Block(
            heading=f"{_MODEL}, {count_parameters(shape).total:,} parameters, {_RANKS} ranks",
            tables=(
                Table(
                    headers=(
                        *("strategy", "sharded", "parameters", "gradients", "optimizer state"),
                        *("together", "communication", "sent per rank"),
                    ),
                    rows=tuple(
                        (
                            strategy,
                            sharded,
                            format_binary_bytes(states[strategy].parameters),
                            format_binary_bytes(states[strategy].gradients),
                            format_binary_bytes(states[strategy].optimizer_state),
                            format_binary_bytes(totals[strategy]),
                            collectives,
                            volume,
                        )
                        for strategy, (sharded, collectives, volume) in _STAGES.items()
                    ),
                    caption="float32, without activations; Ψ is the size of the gradients, volumes "
                    "for many ranks",
                ),
            ),
            findings=(
                make_finding(
                    "sharded_states",
                    "Sharding the optimizer state takes {model} from {unsharded_bytes} to "
                    "{sharded_bytes} per rank.",
                    model=_MODEL,
                    unsharded_bytes=totals["torch_ddp"],
                    sharded_bytes=totals["sharded_optimizer"],
                ),
                make_finding(
                    "against_zero_stage_1",
                    "ZeRO stage 1 reduce-scatters gradients and all-gathers parameters, 2 Ψ as "
                    "plain data parallelism; an all-reduce followed by broadcasts moves 3 Ψ, "
                    "because ranks receive averaged gradients that they do not need. Whole "
                    "parameters as shards are uneven, flat shards are even.",
                ),
            ),
        ),
    )
