"""Answers from sharded training: memory at three instants, by category, and step time."""

from paceline.accounting import count_parameters, model_state_bytes
from paceline.core.presets import model_preset
from paceline.core.specs import precision_preset
from paceline.core.strategies import StrategyName
from paceline.core.units import format_binary_bytes
from paceline.course.answers.block import drawn_blocks, measured_block
from paceline.course.findings.sharding import BASELINE, memory_findings, time_findings
from paceline.course.findings.template import make_finding
from paceline.reports.document.model import Block
from paceline.reports.evidence.groups import Evidence, comparable_groups, includes
from paceline.reports.evidence.strategies import OVER, has_peers
from paceline.reports.tables.table import Table, records_table
from paceline.reports.tables.with_predictions import with_predictions

_SHARDED: StrategyName = "sharded_optimizer"
_MODEL = "xl"
_RANKS = 2
_STAGES: dict[StrategyName, tuple[str, str, str]] = {
    "torch_ddp": ("nothing", "all-reduce", "2 Ψ"),
    "sharded_optimizer": ("optimizer state (ZeRO-1)", "all-reduce, then all-gather", "3 Ψ"),
    "sharded": ("gradients too (ZeRO-2)", "reduce-scatter, then all-gather", "2 Ψ"),
    "fully_sharded": ("parameters too (ZeRO-3)", "reduce-scatter, all-gather twice", "3 Ψ"),
}


def answer_memory(evidence: Evidence) -> tuple[Block, ...]:
    """Returns the memory that sharding saves at each instant, and the remaining memory by part."""
    blocks = []
    found = evidence.find("optimizer")
    groups = comparable_groups(found, OVER, holds=includes("strategy", BASELINE))
    for number, group in enumerate(groups):
        predictions = evidence.predictions_for("optimizer", group)
        joined = with_predictions(group, predictions)
        measured = [record for record in joined if record.metrics]
        description = "Memory of a step by category, measured and predicted"
        drawn, name = [*measured, *predictions], "optimizer-memory"
        tables = (records_table(joined), records_table(joined, "memory"))
        drawings = [(name, drawn, f"{name}-{number}", description)]
        blocks.append(measured_block(group, tables, drawings, memory_findings(measured)))
    return tuple(blocks)


def answer_time(evidence: Evidence) -> tuple[Block, ...]:
    """Returns the effect of sharding on step time."""
    found = [
        record for record in evidence.find("optimizer") if record.metrics and has_peers(record)
    ]
    groups = comparable_groups(found, OVER, holds=includes("strategy", BASELINE, _SHARDED))
    return drawn_blocks(groups, time_findings, name="sharding", plots={})


def calculate_states(_evidence: Evidence) -> tuple[Block, ...]:
    """Calculates the model states and communication volume of each ZeRO stage."""
    shape = model_preset(_MODEL)
    rows, totals = [], {}
    for strategy, (sharded, collectives, volume) in _STAGES.items():
        held = model_state_bytes(shape, precision_preset("float32"), strategy, _RANKS)
        states = (held.parameters, held.gradients, held.optimizer_state)
        totals[strategy] = sum(states)
        sizes = map(format_binary_bytes, (*states, totals[strategy]))
        rows.append((strategy, sharded, *sizes, collectives, volume))
    table = Table(
        headers=(
            *("strategy", "sharded", "parameters", "gradients", "optimizer state"),
            *("total", "communication", "sent per rank"),
        ),
        rows=tuple(rows),
        caption="float32, without activations; Ψ is the size of the gradients, and volumes are for "
        "many ranks",
    )
    saved = make_finding(
        "sharded_optimizer_state",
        "Sharding the optimizer state reduces the model states of {model} from {unsharded_bytes} "
        "to {sharded_bytes} per rank.",
        model=_MODEL,
        unsharded_bytes=totals[BASELINE],
        sharded_bytes=totals[_SHARDED],
    )
    zero = make_finding(
        "against_zero_stage_1",
        "ZeRO stage 1 reduce-scatters gradients and all-gathers parameters: 2 Ψ, the same as plain "
        "data parallelism. An all-reduce followed by broadcasts moves 3 Ψ, because every rank also "
        "receives averaged gradients that it does not need. Shards made of whole parameters are "
        "uneven; shards of a flat buffer are even.",
    )
    heading = f"{_MODEL}, {count_parameters(shape).total:,} parameters, {_RANKS} ranks"
    return (Block(heading=heading, tables=(table,), findings=(saved, zero)),)
