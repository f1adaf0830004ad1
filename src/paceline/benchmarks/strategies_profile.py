"""Traces training steps under several strategies, interleaved on the same ranks.

Phases: all strategies are prepared and warmed up as for a measurement. Then one trace records some
rounds of all of them, and afterwards the group's all-reduces are timed for the prediction. The
first rank analyses the trace. For each strategy, the round with the median step time is kept in
detail, to plot it.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator

import torch.distributed as dist

from paceline.accounting.overlap import simulate_buckets
from paceline.benchmarks.config import DataParallelCase, DataParallelSweep
from paceline.benchmarks.harness.measure import Numbers, measured, predicted
from paceline.benchmarks.harness.ranks import MeasuringRanks, sweep_ranks, trace_case
from paceline.benchmarks.strategies import EXPOSED, StrategyComparison, case_fields, memory_obstacle
from paceline.core.errors import UsageError
from paceline.core.ranges import BACKWARD, FORWARD, OPTIMIZER, short_name
from paceline.core.units import NANOSECOND, Progress
from paceline.parallel.bucket_size import GroupCost, measure_group
from paceline.parallel.strategies import record_statistics, synchronization_stats
from paceline.parallel.traffic import SynchronizationStats
from paceline.records import Record
from paceline.traces.analysis import StepOverlap, TraceAnalysis, analyse_trace, part_samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedRounds:
    """One rank's data about the rounds, in addition to their trace."""

    stats: list[list[SynchronizationStats | None]]
    """Statistics that containers report, by variant and round; None if a container reports none."""
    cost: GroupCost
    """Cost of all-reduces in the group."""


def trace_data_parallel(
    sweep: DataParallelSweep, trace: pathlib.Path, on_progress: Progress
) -> list[Record]:
    """Traces all strategies; returns the records, on the first rank only."""
    cases = list(sweep.cases())
    if len(cases) != 1:
        raise UsageError("--model: a trace shows one model; give exactly one")
    records: list[Record] = []
    (case,) = cases
    for ranks in sweep_ranks(sweep):
        strategies = [variant.strategy for variant in case.variants]
        if (obstacle := memory_obstacle(ranks, case.step, strategies)) is not None:
            raise UsageError(obstacle)
        traced: TracedRounds
        traced = trace_case(ranks, TracedComparison, case, sweep, trace, on_progress)
        if ranks.is_first:
            records += _records(case, ranks, analyse_trace(trace), traced)
    return records


class TracedComparison(StrategyComparison):
    """All strategies of one case on one rank, with the statistics that containers report."""

    def trace_rounds(
        self, trace: pathlib.Path, num_rounds: int, after_round: Callable[[], None] = lambda: None
    ) -> TracedRounds:
        """Traces some rounds and keeps the statistics of each; then times all-reduces."""
        stats: list[list[SynchronizationStats | None]] = [[] for _ in self.steps]
        for step in self.steps:
            record_statistics(step.model)

        def keep_statistics() -> None:
            after_round()
            for step, of_variant in zip(self.steps, stats, strict=True):
                of_variant.append(synchronization_stats(step.model))

        super().trace_rounds(trace, num_rounds, keep_statistics)
        group = dist.group.WORLD
        assert group is not None
        return TracedRounds(stats=stats, cost=measure_group(group, self.device))


def _records(
    case: DataParallelCase, ranks: MeasuringRanks, analysis: TraceAnalysis, traced: TracedRounds
) -> Iterator[Record]:
    for variant, stats in zip(case.variants, traced.stats, strict=True):
        by_rank: dict[int, list[StepOverlap]] = {}
        for step in analysis.steps:
            if step.label == variant.label:
                by_rank.setdefault(step.rank, []).append(step)
        first = by_rank[min(by_rank)]
        by_time = sorted(range(len(first)), key=lambda round_: first[round_].times.step)
        drawn = by_time[len(first) // 2]
        fields = case_fields(case, variant, ranks)
        for rank, steps in by_rank.items():
            numbers = {**part_samples(steps), **_details(steps[drawn])}
            reported = [of_round.exposed_wait_s for of_round in stats if of_round is not None]
            known = [seconds for seconds in reported if seconds is not None]
            if rank == min(by_rank) and known:
                numbers["reported_exposed_s"] = known
            yield measured("timeline", {**fields, "rank": rank}, numbers)
        prediction = stats[drawn]
        # On a CPU, FSDP2 sends nothing while it computes, but the recurrence assumes overlap.
        if prediction is not None and variant.strategy != "torch_fsdp2":
            spans = first[drawn].times.ranges
            backward_ns = next(span.start for span in spans if span.name == BACKWARD)
            expected = _predict(prediction, traced.cost, backward_ns * NANOSECOND)
            yield predicted("timeline", {**fields, "rank": min(by_rank)}, expected)


def _details(step: StepOverlap) -> dict[str, list[float]]:
    """Returns the data for a plot of one step, in seconds from its start."""
    times = step.times
    details = {
        "compute_start_s": times.computing[:, 0].tolist(),
        "compute_end_s": times.computing[:, 1].tolist(),
        "message_start_s": [message.start for message in times.messages],
        "message_end_s": [message.end for message in times.messages],
        "message_exposed_s": [message.exposed for message in times.messages],
    }
    for phase in (FORWARD, BACKWARD, OPTIMIZER):
        spans = [span for span in times.ranges if span.name == phase]
        name = short_name(phase)
        details[f"{name}_start_s"] = [span.start for span in spans[:1]]
        details[f"{name}_end_s"] = [span.end for span in spans[-1:]]
    details["drawn_step_s"] = [times.step]
    details["drawn_exposed_s"] = [times.exposed]
    return {
        name: [value * NANOSECOND for value in values] for name, values in details.items() if values
    }


def _predict(stats: SynchronizationStats, cost: GroupCost, backward_start_s: float) -> Numbers:
    """Simulates the messages of a step with the recurrence, from the times they were ready."""
    # A message sent later was ready when backward ended, and waited for its turn.
    ready_s = [min(bucket.launch_s, stats.backward_s) for bucket in stats.buckets]
    communication_s = [cost.fit.time_s(bucket.num_bytes) for bucket in stats.buckets]
    timeline = simulate_buckets(ready_s, communication_s, stats.backward_s)
    return {
        EXPOSED: timeline.exposed_s,
        "message_start_s": [start_s + backward_start_s for start_s in timeline.start_s],
        "message_end_s": [finish_s + backward_start_s for finish_s in timeline.finish_s],
    }
