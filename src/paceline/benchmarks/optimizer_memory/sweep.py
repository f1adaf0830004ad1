"""Turns memory and times of steps under several strategies into records and predictions."""

import dataclasses
from collections.abc import Iterator

from paceline.accounting.memory.step import MemoryParts, step_memory
from paceline.benchmarks.harness.devices import resolve_device
from paceline.benchmarks.harness.ranks import MeasuringRanks, sweep_ranks
from paceline.benchmarks.harness.records import Numbers, measured, predicted
from paceline.benchmarks.optimizer_memory.config import OptimizerCase, OptimizerSweep
from paceline.benchmarks.optimizer_memory.measure import OptimizerResult, measure
from paceline.benchmarks.strategies.memory_check import memory_obstacle
from paceline.benchmarks.strategies.step import strategy_case_fields
from paceline.core.specs import precision_preset
from paceline.core.strategies import DEFAULT_BUCKET_SIZE_MB
from paceline.kernels import resolve_implementation
from paceline.records import Record
from paceline.records.schema import Outcome

# Time allowed for building a model and tracking its first steps.
_GRACE_S = 600.0


def optimizer_records(sweep: OptimizerSweep) -> Iterator[Record]:
    """Measures every model under every strategy; yields records on rank 0 only."""
    for ranks in sweep_ranks(sweep, grace_s=sweep.time_limit_s + _GRACE_S):
        for case in sweep.cases():
            yield from ranks.on_first(_records_of(sweep, case, ranks))


def _records_of(
    sweep: OptimizerSweep, case: OptimizerCase, ranks: MeasuringRanks
) -> Iterator[Record]:
    result: OptimizerResult | None = None
    outcome: Outcome = "skipped"
    reason = memory_obstacle(ranks, case.step, [case.variant.strategy])
    if reason is None:
        result, reason = ranks.attempt(lambda: ranks.run(measure, case, sweep.time_limit_s))
        outcome = "ok" if reason is None else "failed"
    numbers: Numbers = {}
    if result is not None:
        numbers = {**result.samples, **_memory_numbers(result.memory), **result.resident_bytes}
    fields = strategy_case_fields(case.step, case.variant, ranks)
    yield measured("optimizer", fields, numbers, outcome=outcome, reason=reason)
    expected = _predict(case, ranks.world_size)
    if expected is not None:
        yield predicted("optimizer", fields, expected)


def _memory_numbers(instants: dict[str, MemoryParts]) -> Numbers:
    numbers: dict[str, float] = {}
    for instant, parts in instants.items():
        for name, value in dataclasses.asdict(parts).items():
            numbers[f"{instant}_{name}_bytes"] = value
        numbers[f"peak_{instant}_bytes"] = parts.total
    return numbers


def _predict(case: OptimizerCase, world_size: int) -> Numbers | None:
    """Returns the predictions of the formulas, or None unless the step is eager and on a CPU."""
    if case.step.compilation != "none" or resolve_device(case.step.device).type != "cpu":
        return None
    size = case.variant.bucket_size_mb
    return _memory_numbers(
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
