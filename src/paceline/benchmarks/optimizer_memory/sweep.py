"""From the memory and times of steps under several strategies to records and predictions."""

import dataclasses
from collections.abc import Iterator

from paceline.accounting.memory.step import MemoryParts, step_memory
from paceline.benchmarks.harness.devices import current_environment, resolve_device
from paceline.benchmarks.harness.ranks import MeasuringRanks, failure_reason, sweep_ranks
from paceline.benchmarks.optimizer_memory.config import OptimizerCase, OptimizerSweep
from paceline.benchmarks.optimizer_memory.measure import OptimizerResult, measure
from paceline.benchmarks.strategies.memory_check import memory_obstacle
from paceline.benchmarks.strategies.step import strategy_case_fields
from paceline.core.errors import PacelineError
from paceline.core.specs import precision_preset
from paceline.core.strategies import DEFAULT_BUCKET_SIZE_MB
from paceline.kernels import resolve_implementation
from paceline.records import Metric, Record
from paceline.records.kinds import PREDICTION, PREDICTS
from paceline.records.schema import Outcome

# What making a model and following its first steps may take.
_GRACE_S = 600.0


def optimizer_records(sweep: OptimizerSweep) -> Iterator[Record]:
    """Measures every model under every strategy; yields records on rank 0 only."""
    for ranks in sweep_ranks(
        sweep.world_size,
        device=sweep.device,
        timeout_s=sweep.timeout_s,
        run_timeout_s=sweep.timeout_s + sweep.time_limit_s + _GRACE_S,
    ):
        for case in sweep.cases():
            for record in _records_of(sweep, case, ranks):
                if ranks.is_first:
                    yield record


def _records_of(
    sweep: OptimizerSweep, case: OptimizerCase, ranks: MeasuringRanks
) -> Iterator[Record]:
    metrics: dict[str, Metric] = {}
    outcome: Outcome = "skipped"
    reason = memory_obstacle(ranks, case.step, [case.variant.strategy])
    if reason is None:
        try:
            metrics = _metrics(ranks.run(measure, case, sweep.time_limit_s))
            outcome = "ok"
        except PacelineError as error:
            if not ranks.survives_failure:
                raise
            outcome, reason = "failed", failure_reason(error)
    fields = strategy_case_fields(case.step, case.variant, ranks)
    yield Record(
        kind="optimizer",
        case=fields,
        environment=current_environment(),
        metrics=metrics,
        outcome=outcome,
        reason=reason,
    )
    predicted = _predict(case, ranks.world_size)
    if predicted is not None:
        yield Record(
            kind=PREDICTION,
            case={PREDICTS: "optimizer", **fields},
            environment=current_environment(),
            metrics=predicted,
            outcome="ok",
        )


def _metrics(result: OptimizerResult) -> dict[str, Metric]:
    return {
        **{name: Metric.from_samples(values) for name, values in result.samples.items()},
        **_memory_metrics(result.memory),
        **{
            f"resident_peak_{instant}_bytes": Metric(value=value)
            for instant, value in result.resident_bytes.items()
        },
    }


def _memory_metrics(instants: dict[str, MemoryParts]) -> dict[str, Metric]:
    metrics = {}
    for instant, parts in instants.items():
        for name, value in dataclasses.asdict(parts).items():
            metrics[f"{instant}_{name}_bytes"] = Metric(value=value)
        metrics[f"peak_{instant}_bytes"] = Metric(value=parts.total)
    return metrics


def _predict(case: OptimizerCase, world_size: int) -> dict[str, Metric] | None:
    """Returns what the formulas expect, where they apply: eager, on a CPU."""
    if case.step.compilation != "none" or resolve_device(case.step.device).type != "cpu":
        return None
    size = case.variant.bucket_size_mb
    return _memory_metrics(
        step_memory(
            case.step.shape,
            case.step.batch,
            precision_preset(case.step.precision),
            case.variant.strategy,
            world_size,
            activation_checkpointing=case.step.activation_checkpointing,
            attention=resolve_implementation(case.step.attention, "cpu"),
            bucket_size_mb=size if isinstance(size, float) else DEFAULT_BUCKET_SIZE_MB,
        )
    )
