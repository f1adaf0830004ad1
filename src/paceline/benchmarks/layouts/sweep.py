"""Turns training steps under several layouts into records."""

import dataclasses
import os
from collections.abc import Iterator

import torch

from paceline.benchmarks.harness.measure import Progress, ratio_metric
from paceline.benchmarks.harness.ranks import MeasuringRanks, sweep_ranks
from paceline.benchmarks.harness.records import Numbers, measured
from paceline.benchmarks.harness.turns import measure_rounds
from paceline.benchmarks.layouts.config import LayoutCase, LayoutSweep
from paceline.benchmarks.layouts.layout_text import WrittenLayout
from paceline.benchmarks.layouts.measure import LayoutResult, prepare
from paceline.benchmarks.layouts.step import PEAK, STEP
from paceline.core.specs import BatchShape
from paceline.kernels import resolve_implementation
from paceline.parallel import is_launched
from paceline.records import CaseValue, Metric, Record
from paceline.records.schema import model_case_fields

GRACE_S = 600.0
"""Seconds allowed for building the models and the first steps."""


def layout_records(sweep: LayoutSweep, on_progress: Progress) -> Iterator[Record]:
    """Measures every model under all layouts; yields records on rank 0 only."""
    for case in sweep.cases():
        for ranks in layout_ranks(sweep, case):
            yield from ranks.on_first(_records_of(sweep, case, ranks, on_progress))


def layout_ranks(sweep: LayoutSweep, case: LayoutCase) -> Iterator[MeasuringRanks]:
    """Yields the launcher's ranks, or starts as many as the layouts have."""
    if not is_launched(os.environ):
        sweep = dataclasses.replace(sweep, world_size=case.layouts[0].layout.world_size)
    return sweep_ranks(sweep, grace_s=GRACE_S)


def _records_of(
    sweep: LayoutSweep, case: LayoutCase, ranks: MeasuringRanks, on_progress: Progress
) -> Iterator[Record]:
    results, reason = ranks.attempt(lambda: _measure(sweep, case, ranks, on_progress))
    for index, written in enumerate(case.layouts):
        yield measured(
            "layout",
            {
                **layout_case_fields(case, written, ranks),
                "baseline": case.layouts[0].text,
                "warmup": case.warmup,
                "rounds": case.rounds,
            },
            {} if results is None else _numbers(case, results[index], results[0]),
            outcome="ok" if reason is None else "failed",
            reason=reason,
        )


def _measure(
    sweep: LayoutSweep, case: LayoutCase, ranks: MeasuringRanks, on_progress: Progress
) -> list[LayoutResult]:
    ranks.run(prepare, case)
    return measure_rounds(ranks, case.warmup, case.rounds, sweep.time_limit_s, on_progress)


def _numbers(case: LayoutCase, result: LayoutResult, baseline: LayoutResult) -> Numbers:
    numbers: dict[str, Metric | float | list[float]] = {**result.samples, PEAK: result.peak_bytes}
    num_tokens = case.batch_size * case.context_length
    numbers["tokens_per_s"] = num_tokens / Metric.from_samples(result.samples[STEP]).value
    if result is not baseline:
        numbers["step_time_ratio"] = ratio_metric(result.samples[STEP], baseline.samples[STEP])
    return numbers


def layout_case_fields(
    case: LayoutCase, written: WrittenLayout, ranks: MeasuringRanks
) -> dict[str, CaseValue]:
    """Returns the case fields of the record of a step under a layout."""
    batch = BatchShape(num_sequences=written.micro_batch, context_length=case.context_length)
    device = str(ranks.topology["device"])
    return {
        "layout": written.text,
        **model_case_fields(case.model, case.shape, batch),
        "batch_size": case.batch_size,
        "precision": "float32",
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "attention": resolve_implementation("auto", device),
        "optimizer": "adamw-fused",
        **ranks.topology,
    }
