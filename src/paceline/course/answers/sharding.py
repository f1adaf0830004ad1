"""What records of sharded training answer: memory at three instants, its parts, and time."""

from collections.abc import Sequence

from paceline.accounting import count_parameters, model_state_bytes
from paceline.core.presets import model_preset
from paceline.core.specs import precision_preset
from paceline.core.strategies import StrategyName
from paceline.core.units import format_binary_bytes, format_seconds
from paceline.course.answers.block import measured_block
from paceline.course.findings.phrases import times, verdict
from paceline.records import Record
from paceline.reports.document.model import Block
from paceline.reports.document.pictures import draw_picture
from paceline.reports.evidence.comparison import compare
from paceline.reports.evidence.fields import strategy_text
from paceline.reports.evidence.groups import Evidence, comparable_groups, includes
from paceline.reports.evidence.strategies import OVER, has_peers
from paceline.reports.tables.table import Table, records_table
from paceline.reports.tables.with_predictions import with_predictions

_BASE = "torch_ddp"
_SHARDED = "sharded_optimizer"
_PARTS = ("parameters", "gradients", "optimizer_state", "buffers", "activations")
_MODEL = "xl"
_RANKS = 2
_STAGES: dict[StrategyName, tuple[str, str, str]] = {
    "torch_ddp": ("nothing", "all-reduce", "2 Ψ"),
    "sharded_optimizer": ("optimizer state", "all-reduce, then broadcast", "3 Ψ"),
    "sharded": ("state and gradients (ZeRO 2)", "reduce-scatter, then all-gather", "2 Ψ"),
    "fully_sharded": ("parameters too (ZeRO 3)", "reduce-scatter, all-gather twice", "3 Ψ"),
}


def answer_memory(evidence: Evidence) -> tuple[Block, ...]:
    """Answers what sharding saves at each instant, and what the rest is."""
    blocks = []
    found = evidence.find("optimizer")
    groups = comparable_groups(found, OVER, holds=includes("strategy", _BASE))
    for number, group in enumerate(groups):
        predictions = evidence.predictions_for("optimizer", group)
        joined = with_predictions(group, predictions)
        measured = [record for record in joined if record.metrics]
        blocks.append(
            measured_block(
                group,
                tables=(records_table(joined), records_table(joined, "memory")),
                pictures=(
                    draw_picture(
                        "optimizer-memory",
                        [*measured, *predictions],
                        f"optimizer-memory-{number}",
                        "Memory of a step by what it holds, measured and predicted",
                    ),
                ),
                findings=_sentences(measured),
            )
        )
    return tuple(blocks)


def _sentences(records: Sequence[Record]) -> list[str]:
    base = next(record for record in records if record.case["strategy"] == _BASE)
    parts = {name: base.metrics[f"before_step_{name}_bytes"].value for name in _PARTS}
    largest = max(parts, key=lambda name: parts[name])
    sentences = [
        f"Unsharded ({strategy_text(base)}), a rank holds {_bytes(base, 'after_init')} after "
        f"initialisation, {_bytes(base, 'before_step')} before the optimizer's step and "
        f"{_bytes(base, 'after_step')} after it; before the step {largest.replace('_', ' ')} is "
        f"the largest part, {format_binary_bytes(parts[largest])}."
    ]
    for record in records:
        if record is base:
            continue
        state = record.metrics["before_step_optimizer_state_bytes"].value
        sentences.append(
            f"{strategy_text(record)} peaks at {_bytes(record, 'before_step')}"
            f"{_difference(_peak(record, 'before_step'), _peak(base, 'before_step'))}; its "
            f"optimizer state is {format_binary_bytes(state)} beside the unsharded "
            f"{format_binary_bytes(parts['optimizer_state'])}."
        )
    checked = [
        (record, predicted.value)
        for record in records
        if (predicted := record.metrics.get("predicted_peak_before_step_bytes")) is not None
        and predicted.value > 0
    ]
    if checked:
        worst, expected = max(
            checked, key=lambda pair: abs(_peak(pair[0], "before_step") / pair[1] - 1)
        )
        told = verdict(_peak(worst, "before_step"), expected, 0.02)
        sentences.append(
            f"The peak that is furthest from its prediction, {strategy_text(worst)}'s, {told}."
        )
    return sentences


def _difference(value: float, reference: float) -> str:
    if reference <= 0:
        return ""
    share = f"{abs(value / reference - 1):.0%}"
    if share == "0%":
        return ", as much"
    return f", {share} {'less' if value < reference else 'more'}"


def _peak(record: Record, instant: str) -> float:
    return record.metrics[f"peak_{instant}_bytes"].value


def _bytes(record: Record, instant: str) -> str:
    return format_binary_bytes(_peak(record, instant))


def answer_time(evidence: Evidence) -> tuple[Block, ...]:
    """Answers what sharding does to the time of a step."""
    blocks = []
    found = [record for record in evidence.find("optimizer") if has_peers(record)]
    for group in comparable_groups(found, OVER, holds=includes("strategy", _BASE, _SHARDED)):
        measured = [record for record in group if record.metrics]
        base = next(record for record in measured if record.case["strategy"] == _BASE)
        sentences = [_time_sentence(record, base) for record in measured if record is not base]
        sentences.append(
            f"Sharding divides the optimizer's work among {base.case['world_size']} ranks and adds "
            "an exchange of the new parameters; which of the two wins depends on what carries "
            "them. The strategies ran one after the other here; paceline bench ddp measures them "
            "in turn, for fine differences."
        )
        blocks.append(
            measured_block(
                group,
                tables=(_time_table(measured, base),),
                findings=sentences,
            )
        )
    return tuple(blocks)


def _time_sentence(record: Record, base: Record) -> str:
    text = f"A step of {strategy_text(record)} takes {format_seconds(_step(record))}"
    plain = f"the unsharded one's {format_seconds(_step(base))}"
    ratio = compare(record.metrics["step_time_s"], base.metrics["step_time_s"])
    if ratio is not None:
        longer = "longer" if ratio.value > 1 else "no longer"
        text += {
            "less": f", {times(ratio.value)}, shorter than {plain}",
            "more": f", {times(ratio.value)}, longer than {plain}",
            "alike": f", {times(ratio.value)} {plain}: the two cannot be told apart",
            "unknown": f", {times(ratio.value)} {plain}: {longer}, {ratio.judged_by('sample')}",
        }[ratio.standing]
    if _optimizer(base) > 0:
        text += f"; its optimizer takes {times(_optimizer(record) / _optimizer(base))} as long"
    return f"{text}."


def _time_table(records: Sequence[Record], base: Record) -> Table:
    return Table(
        headers=("strategy", "step (ms)", "optimizer (ms)", "step, to unsharded"),
        rows=tuple(
            (
                strategy_text(record),
                f"{_step(record) * 1e3:.4g}",
                f"{_optimizer(record) * 1e3:.4g}",
                f"{_step(record) / _step(base):.3f}",
            )
            for record in records
        ),
        caption=f"{base.case['model']}, {base.case['world_size']} ranks",
    )


def _step(record: Record) -> float:
    return record.metrics["step_time_s"].value


def _optimizer(record: Record) -> float:
    return record.metrics["optimizer_time_s"].value


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
                        *("strategy", "divided", "parameters", "gradients", "optimizer state"),
                        *("together", "communication", "sent per rank"),
                    ),
                    rows=tuple(
                        (
                            strategy,
                            divided,
                            format_binary_bytes(states[strategy].parameters),
                            format_binary_bytes(states[strategy].gradients),
                            format_binary_bytes(states[strategy].optimizer_state),
                            format_binary_bytes(totals[strategy]),
                            collectives,
                            volume,
                        )
                        for strategy, (divided, collectives, volume) in _STAGES.items()
                    ),
                    caption="float32, without activations; Ψ is the size of the gradients, volumes "
                    "for many ranks",
                ),
            ),
            findings=(
                f"Dividing the optimizer's state takes {_MODEL} from "
                f"{format_binary_bytes(totals['torch_ddp'])} to "
                f"{format_binary_bytes(totals['sharded_optimizer'])} per rank.",
                "ZeRO stage 1 reduce-scatters gradients and all-gathers parameters, 2 Ψ as plain "
                "data parallelism; an all-reduce followed by broadcasts moves 3 Ψ, because ranks "
                "receive averaged gradients that they do not need. Whole parameters as units also "
                "divide unevenly, flat shards are even.",
            ),
        ),
    )
