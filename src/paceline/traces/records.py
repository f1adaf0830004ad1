"""Converts the analysis of a trace to records."""

from collections.abc import Iterator, Sequence

from paceline.core.units import NANOSECOND
from paceline.records import Metric, Record
from paceline.records.environment import Environment
from paceline.traces.analysis import StepOverlap, TraceAnalysis
from paceline.traces.operators import OperatorTime

ALL_OPERATORS = "all"
"""Replaces the operator's name in rows that sum all operators of a class."""

_MAX_OPERATORS = 8
"""Number of operators listed by name per range: those with the most time."""


def part_samples(steps: Sequence[StepOverlap]) -> dict[str, list[float]]:
    """Returns the parts of each step's time in seconds, and the overlapped communication."""
    parts = {
        "step_time_s": [step.times.step for step in steps],
        "compute_s": [step.compute for step in steps],
        "contention_s": [step.contention for step in steps],
        "exposed_communication_s": [step.times.exposed for step in steps],
        "idle_s": [step.times.idle for step in steps],
        "overlapped_communication_s": [step.times.overlapped for step in steps],
    }
    return {name: [value * NANOSECOND for value in values] for name, values in parts.items()}


def step_records(analysis: TraceAnalysis, subject: str, environment: Environment) -> list[Record]:
    """Returns one record per rank and label, with the steps as samples."""
    groups: dict[tuple[int, str], list[StepOverlap]] = {}
    for step in analysis.steps:
        groups.setdefault((step.rank, step.label), []).append(step)
    return [
        Record(
            kind="trace_step",
            case={"subject": subject, "rank": rank, "label": label},
            environment=environment,
            metrics={name: Metric.from_samples(own) for name, own in part_samples(steps).items()},
            outcome="ok",
        )
        for (rank, label), steps in groups.items()
    ]


def operator_records(
    analysis: TraceAnalysis, subject: str, environment: Environment
) -> Iterator[Record]:
    """Yields time, calls and FLOPs of each range: by kind of work, then by operator.

    Numbers are averages per step and rank.
    """
    num_steps = max(1, len(analysis.steps))
    ranges: dict[str, list[OperatorTime]] = {}
    for row in analysis.operators:
        ranges.setdefault(row.range_name, []).append(row)
    for range_name, rows in ranges.items():
        total = sum(row.self_time for row in rows)
        kinds: dict[str, list[OperatorTime]] = {}
        for row in rows:
            kinds.setdefault(row.op_class, []).append(row)
        by_time = sorted(kinds.items(), key=lambda item: -sum(row.self_time for row in item[1]))
        chosen: list[tuple[str, str, list[OperatorTime]]] = [
            *((kind, ALL_OPERATORS, of_kind) for kind, of_kind in by_time),
            *((row.op_class, row.name, [row]) for row in rows[:_MAX_OPERATORS]),
        ]
        for kind, operator, summed in chosen:
            own = sum(row.self_time for row in summed)
            metrics = {
                "own_time_s": own * NANOSECOND / num_steps,
                "share": own / total if total else 0.0,
                "num_calls": sum(row.num_calls for row in summed) / num_steps,
                "flops": sum(row.flops for row in summed) / num_steps,
            }
            yield Record(
                kind="operator",
                case={"subject": subject, "range": range_name, "work": kind, "operator": operator},
                environment=environment,
                metrics={name: Metric(value=value) for name, value in metrics.items()},
                outcome="ok",
            )
