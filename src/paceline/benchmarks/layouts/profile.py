"""Traces the steps of several layouts, interleaved on the same ranks.

Phases: all layouts are prepared and warmed up as for a measurement. Then one trace records some
rounds of all of them. The first rank analyses it. For each layout it computes how long the ranks
computed and how long they only communicated. For each layout with a pipeline it computes how long
the stages were idle in every step, and keeps the step of median duration in detail, to plot it.
"""

import pathlib
import statistics
from collections.abc import Iterator, Sequence

import torch

from paceline.benchmarks.harness.measure import Progress
from paceline.benchmarks.harness.ranks import MeasuringRanks
from paceline.benchmarks.harness.records import measured, predicted
from paceline.benchmarks.harness.turns import held, warm_up
from paceline.benchmarks.layouts.config import LayoutCase, LayoutSweep
from paceline.benchmarks.layouts.measure import prepare
from paceline.benchmarks.layouts.sweep import layout_case_fields, layout_ranks
from paceline.core.errors import UsageError
from paceline.records import Record
from paceline.traces.capture.profiler import record_ranks
from paceline.traces.records import part_samples
from paceline.traces.steps.analysis import StepOverlap, analyse_trace
from paceline.traces.steps.pipeline import PipelineStep, pipeline_steps


def trace_layouts(sweep: LayoutSweep, trace: pathlib.Path, on_progress: Progress) -> list[Record]:
    """Traces all layouts; returns the records, on the first rank only.

    Args:
        sweep: One model, and its layouts.
        trace: The file to write, which must be accessible to all ranks.
        on_progress: Called with the number of completed rounds.
    """
    cases = list(sweep.cases())
    if len(cases) != 1:
        raise UsageError("a trace shows one model; give exactly one --model")
    (case,) = cases
    records: list[Record] = []
    for ranks in layout_ranks(sweep, case):
        ranks.run(prepare, case)
        warm_up(ranks, case.warmup, case.rounds, on_progress)
        ranks.run(trace_rounds, trace, case.rounds)
        on_progress(case.warmup + case.rounds, case.warmup + case.rounds)
        if ranks.is_first:
            records += _records(case, ranks, trace)
    return records


def trace_rounds(device: torch.device, trace: pathlib.Path, num_rounds: int) -> None:
    """Runs some rounds of the prepared case, and traces them on every rank."""
    with record_ranks(trace, device):
        for _ in range(num_rounds):
            held().run_round(measured=False)


def _records(case: LayoutCase, ranks: MeasuringRanks, trace: pathlib.Path) -> Iterator[Record]:
    analysis = analyse_trace(trace)
    for written in case.layouts:
        layout = written.layout
        fields = layout_case_fields(case, written, ranks)
        how = {"warmup": case.warmup, "rounds": case.rounds}
        steps = [step for step in analysis.steps if step.label == written.text]
        yield measured("layout_trace", {**fields, **how}, _shares(steps))
        if layout.pipeline == 1:
            continue
        # Stages are outermost: ranks of one pipeline are world_size / pipeline apart.
        own = range(0, layout.world_size, layout.world_size // layout.pipeline)
        yield measured("pipeline", {**fields, **how}, _numbers(pipeline_steps(steps, own)))
        if not written.zero_bubble:
            passes = layout.pipeline_interleave * case.num_micro_batches(written)
            yield predicted("pipeline", fields, {"bubble": (layout.pipeline - 1) / passes})


def _shares(steps: Sequence[StepOverlap]) -> dict[str, list[float]]:
    """Returns the parts of each step of a layout, in seconds, averaged over ranks."""
    by_rank: dict[int, list[StepOverlap]] = {}
    for step in steps:
        by_rank.setdefault(step.rank, []).append(step)
    samples = [part_samples(of_rank) for of_rank in by_rank.values()]
    return {
        name: [statistics.mean(step) for step in zip(*(own[name] for own in samples), strict=True)]
        for name in samples[0]
    }


def _numbers(steps: Sequence[PipelineStep]) -> dict[str, list[float]]:
    numbers = {
        "duration_s": [step.duration_s for step in steps],
        "work_s": [step.work_s / len(step.ranks) for step in steps],
        "idle": [step.idle for step in steps],
        "bubble": [step.bubble for step in steps],
        "order_bubble": [step.order_bubble for step in steps],
        "imbalance": [step.imbalance for step in steps],
        "messages": [step.messages for step in steps],
    }
    drawn = sorted(steps, key=lambda step: step.duration_s)[len(steps) // 2]
    for phase in dict.fromkeys(piece.what.phase for piece in drawn.work):
        pieces = [piece for piece in drawn.work if piece.what.phase == phase]
        numbers |= {
            f"{phase}_start_s": [piece.start_s for piece in pieces],
            f"{phase}_end_s": [piece.end_s for piece in pieces],
            f"{phase}_rank": [float(piece.rank) for piece in pieces],
            f"{phase}_stage": [float(piece.what.stage) for piece in pieces],
        }
        if phase != "loss":
            numbers[f"{phase}_micro_batch"] = [
                float(piece.what.micro_batch or 0) for piece in pieces
            ]
    return numbers
