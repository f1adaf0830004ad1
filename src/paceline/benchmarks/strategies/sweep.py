"""Turns training steps under several strategies into records."""

import dataclasses
import logging
from collections.abc import Iterator

from paceline.benchmarks.harness.measure import Progress, ratio_metric
from paceline.benchmarks.harness.ranks import MeasuringRanks, sweep_ranks
from paceline.benchmarks.harness.records import Numbers, measured, predicted
from paceline.benchmarks.harness.turns import measure_rounds
from paceline.benchmarks.strategies.config import DataParallelCase, DataParallelSweep, Variant
from paceline.benchmarks.strategies.measure import EXPOSED, STEP, VariantResult, prepare
from paceline.benchmarks.strategies.memory_check import memory_obstacle
from paceline.benchmarks.strategies.step import strategy_case_fields
from paceline.records import CaseValue, Metric, Record
from paceline.records.schema import Outcome

_logger = logging.getLogger(__name__)

GRACE_S = 600.0
"""Seconds allowed for building the models and the first step, compilation included."""


def data_parallel_records(sweep: DataParallelSweep, on_progress: Progress) -> Iterator[Record]:
    """Measures every model under all strategies; yields records on rank 0 only."""
    for ranks in sweep_ranks(sweep, grace_s=GRACE_S):
        for case in sweep.cases():
            yield from ranks.on_first(_records_of(sweep, case, ranks, on_progress))


def _records_of(
    sweep: DataParallelSweep, case: DataParallelCase, ranks: MeasuringRanks, on_progress: Progress
) -> Iterator[Record]:
    results: list[VariantResult] | None = None
    outcome: Outcome = "skipped"
    reason = memory_obstacle(ranks, case.step, [variant.strategy for variant in case.variants])
    if reason is None:
        results, reason = ranks.attempt(lambda: _measure(sweep, case, ranks, on_progress))
        outcome = "ok" if reason is None else "failed"
    for index, variant in enumerate(case.variants):
        yield measured(
            "ddp",
            case_fields(case, variant, ranks),
            {} if results is None else _numbers(results[index], results[0]),
            outcome=outcome,
            reason=reason,
        )
        if results is not None:
            yield from _predictions(case, variant, results[index], ranks)


def _predictions(
    case: DataParallelCase, variant: Variant, result: VariantResult, ranks: MeasuringRanks
) -> Iterator[Record]:
    """Yields the predictions of an automatic choice for every bucket size."""
    choice = result.choice
    if choice is None:
        return
    for size, candidate in choice.candidates.items():
        numbers = {
            EXPOSED: candidate.exposed_s,
            "num_messages": candidate.num_buckets,
            "gradient_bytes": result.memory["gradient_bytes"],
            "latency_s": choice.latency_s,
            "algorithm_bandwidth_bytes_per_s": choice.bytes_per_s,
        }
        yield predicted(
            "ddp",
            case_fields(case, dataclasses.replace(variant, bucket_size_mb=size), ranks),
            {name: number for name, number in numbers.items() if number is not None},
        )


def _measure(
    sweep: DataParallelSweep, case: DataParallelCase, ranks: MeasuringRanks, on_progress: Progress
) -> list[VariantResult]:
    ranks.run(prepare, case)
    results: list[VariantResult] = measure_rounds(
        ranks, sweep.warmup, sweep.rounds, sweep.time_limit_s, on_progress
    )
    for variant, result in zip(case.variants, results, strict=True):
        if result.choice is not None and ranks.is_first:
            _logger.info("%s: %s", variant.label, result.choice.explain())
    return results


def _numbers(result: VariantResult, baseline: VariantResult) -> Numbers:
    numbers: dict[str, Metric | float | list[float]] = {**result.samples, **result.memory}
    numbers["num_messages"] = result.num_messages
    if result is not baseline:
        numbers["step_time_ratio"] = ratio_metric(result.samples[STEP], baseline.samples[STEP])
    if result.choice is not None:
        numbers["chosen_bucket_size_mb"] = result.choice.bucket_size_mb
    return numbers


def case_fields(
    case: DataParallelCase, variant: Variant, ranks: MeasuringRanks
) -> dict[str, CaseValue]:
    """Returns the case fields of one strategy's record."""
    fields = strategy_case_fields(case.step, variant, ranks)
    rounds = fields.pop("steps")
    return {**fields, "baseline": case.variants[0].label, "rounds": rounds}
