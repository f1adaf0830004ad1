"""Findings about sharded training: memory at three instants, and step time."""

from collections.abc import Iterator, Sequence

from paceline.core.finding import Finding
from paceline.core.strategies import StrategyName
from paceline.course.findings.template import against, make_finding
from paceline.records import Record
from paceline.reports.evidence.comparison import compare
from paceline.reports.evidence.fields import case_number, strategy_text
from paceline.reports.evidence.strategies import step_seconds

BASELINE: StrategyName = "torch_ddp"
_PARTS = ("parameters", "gradients", "optimizer_state", "buffers", "activations")
_PREDICTED = "predicted_peak_before_step_bytes"


def memory_findings(records: Sequence[Record]) -> Iterator[Finding]:
    """Yields peak memory with and without sharding, and the worst error of its prediction."""
    baseline = _find_baseline(records)
    parts = {name: baseline.metrics[f"before_step_{name}_bytes"].value for name in _PARTS}
    largest = max(parts, key=lambda name: parts[name])
    yield make_finding(
        "unsharded_memory",
        "Without sharding, the peak memory of a rank is {after_init_bytes} after initialisation, "
        "{before_step_bytes} before the optimizer step and {after_step_bytes} after the step. The "
        "largest part before the step is the {largest}: {largest_bytes}.",
        after_init_bytes=_peak(baseline, "after_init"),
        before_step_bytes=_peak(baseline),
        after_step_bytes=_peak(baseline, "after_step"),
        largest=largest.replace("_", " "),
        largest_bytes=parts[largest],
    )
    for record in records:
        if record is not baseline:
            yield make_finding(
                "sharded_memory",
                "With {strategy}, the peak before the optimizer step is {before_step_bytes}, "
                "{peak_share} of the peak without sharding; the optimizer state takes "
                "{state_bytes} instead of {unsharded_state_bytes}.",
                strategy=strategy_text(record),
                before_step_bytes=_peak(record),
                peak_share=_peak(record) / _peak(baseline),
                state_bytes=record.metrics["before_step_optimizer_state_bytes"].value,
                unsharded_state_bytes=parts["optimizer_state"],
            )
    predicted = [record for record in records if _PREDICTED in record.metrics]
    if predicted:
        worst = max(predicted, key=lambda record: abs(_peak(record) / _predicted(record) - 1))
        yield make_finding(
            "peak_prediction",
            "The prediction of peak memory is furthest off for {strategy}: {peak_bytes} measured, "
            "{predicted_bytes} predicted: {verdict}.",
            strategy=strategy_text(worst),
            peak_bytes=_peak(worst),
            predicted_bytes=_predicted(worst),
            verdict=against(_peak(worst), _predicted(worst)),
        )


def time_findings(records: Sequence[Record]) -> Iterator[Finding]:
    """Yields the effect of sharding on step time and optimizer time."""
    baseline = _find_baseline(records)
    before = baseline.metrics
    for record in records:
        if record is not baseline:
            after = record.metrics
            yield make_finding(
                "step_against_unsharded",
                "A step with {strategy} takes {step_s}, {step_ratio} as long as without sharding "
                "({unsharded_step_s}); the optimizer takes {optimizer_ratio} as long.",
                strategy=strategy_text(record),
                step_s=step_seconds(record),
                step_ratio=compare(after["step_time_s"], before["step_time_s"]),
                unsharded_step_s=step_seconds(baseline),
                optimizer_ratio=compare(after["optimizer_time_s"], before["optimizer_time_s"]),
            )
    yield make_finding(
        "sharding_tradeoff",
        "Sharding splits the optimizer's work over {world_size} ranks but adds an all-gather of "
        "the new parameters: whether a step becomes faster depends on the link.",
        "The strategies ran one after the other here. For small differences, use paceline bench "
        "ddp, which interleaves their steps.",
        world_size=case_number(baseline, "world_size"),
    )


def _find_baseline(records: Sequence[Record]) -> Record:
    return next(record for record in records if record.case["strategy"] == BASELINE)


def _peak(record: Record, instant: str = "before_step") -> float:
    return record.metrics[f"peak_{instant}_bytes"].value


def _predicted(record: Record) -> float:
    return record.metrics[_PREDICTED].value
