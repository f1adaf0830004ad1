"""Analyses where the time of a trace went, in bounded memory.

Phases: the trace is read once, its events are written to disk as integers, and the steps of each
rank are found (ranges named ``paceline::step``, or the profiler's own; without either, the whole
trace is one step). The events are then divided by step, and each step of each rank is analysed
separately. Totals over all steps accumulate meanwhile: time by operator, and operator times with
and without communication in flight. The results become records.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from paceline.core.units import NANOSECOND
from paceline.records import CaseValue, Metric, Record
from paceline.records.environment import Environment
from paceline.traces.catalog import EVENT, Catalog, EventTable, Role
from paceline.traces.event_buffer import EventBuffer, StepBuffer
from paceline.traces.intervals import Intervals
from paceline.traces.operators import (
    ContentionTotals,
    OperatorTime,
    OperatorTotals,
    launches,
    step_self_times,
)
from paceline.traces.overlap import StepRoles, StepTimes, step_times
from paceline.traces.reader import Event, TraceError, TraceReader

MAX_STEPS = 100_000
"""Limit for all ranks together; longer traces should be analysed in parts."""


class Timeline:
    """The steps of each rank, from all events of a trace; the path is used in error messages."""

    def __init__(self, events: EventBuffer, catalog: Catalog, path: pathlib.Path) -> None:
        self._labels = catalog.step_labels()
        self._rank_of_thread = catalog.rank_of_thread()
        self._is_step = np.isin(np.arange(len(catalog.keys)), list(self._labels))
        self._is_device_work = catalog.roles() == Role.DEVICE_WORK
        self._found: dict[int, list[tuple[int, int, str]]] = {}
        self._reach: dict[int, tuple[int, int]] = {}
        self.device_ranks: set[int] = set()
        """Ranks that run work on a GPU."""
        for chunk in events.chunks():
            self._look_at(chunk)
            if sum(len(steps) for steps in self._found.values()) > MAX_STEPS:
                raise TraceError(f"{path}: more than {MAX_STEPS} steps; trace fewer steps")
        self.windows: dict[int, Intervals] = {}
        """Start and end of each rank's steps, in order and disjoint."""
        self.labels: dict[int, list[str]] = {}
        for rank, reach in sorted(self._reach.items()):
            whole = [] if self._labels else [(*reach, "")]
            steps = sorted(self._found.get(rank, whole))
            starts = np.array([start for start, _, _ in steps], dtype=np.int64)
            ends = np.array([end for _, end, _ in steps], dtype=np.int64)
            # Where steps overlap, the time belongs to the first.
            starts[1:] = np.maximum(starts[1:], np.maximum.accumulate(ends)[:-1])
            self.windows[rank] = np.stack((starts, np.maximum(starts, ends)), axis=1)
            self.labels[rank] = [label for _, _, label in steps]

    def _look_at(self, chunk: EventTable) -> None:
        ranks = self._rank_of_thread[chunk["thread"]]
        self.device_ranks.update(np.unique(ranks[self._is_device_work[chunk["key"]]]).tolist())
        for rank in np.unique(ranks).tolist():
            mine = chunk[ranks == rank]
            first, last = int(mine["start"].min()), int(mine["end"].max())
            before = self._reach.get(rank, (first, last))
            self._reach[rank] = (min(first, before[0]), max(last, before[1]))
        is_step = self._is_step[chunk["key"]]
        for event, rank in zip(chunk[is_step].tolist(), ranks[is_step].tolist(), strict=True):
            start, end, key, *_ = event
            self._found.setdefault(rank, []).append((start, end, self._labels[key]))


_MAX_KEPT_SPANS = 500_000
"""Limit for all steps together; later steps keep only their totals."""

OnProgress = Callable[[int], None]
"""Called with the number of bytes read so far."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOverlap:
    """Time breakdown of one step on one rank; compute + contention + exposed + idle = step."""

    rank: int
    index: int
    start: int
    """Nanoseconds from the origin of the trace's clock, which all ranks share."""
    label: str
    """Name of the workload that the step ran, such as a strategy."""
    times: StepTimes
    contention: int
    """Nanoseconds by which communication slowed computation; zero if unknown."""

    @property
    def compute(self) -> int:
        """Nanoseconds that computation would have taken without communication in flight."""
        return self.times.busy - self.contention


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceAnalysis:
    """The results of analysing a trace."""

    steps: tuple[StepOverlap, ...]
    operators: tuple[OperatorTime, ...]
    num_events: int
    """Number of events that are work, communication or a range."""
    is_truncated: bool
    """Whether the file ended before the trace did."""


def analyse_trace(path: pathlib.Path, on_progress: OnProgress = lambda _: None) -> TraceAnalysis:
    """Analyses a trace, plain or gzipped, of one rank or merged from several."""
    catalog = Catalog(path)
    reader = TraceReader(path, Event)
    with EventBuffer(EVENT) as buffer:
        for events in reader:
            buffer.append(catalog.number(events))
            on_progress(reader.num_bytes)
        timeline = Timeline(buffer, catalog, path)
        totals = _Totals(catalog, timeline.device_ranks)
        with StepBuffer(buffer, catalog.rank_of_thread(), timeline.windows) as by_step:
            for rank, windows in timeline.windows.items():
                for index, (start, end) in enumerate(windows.tolist()):
                    totals.add(start, end, rank, by_step.read_step(rank, index))
        names = (
            (rank, index, start, label)
            for rank, labels in timeline.labels.items()
            for index, (start, label) in enumerate(
                zip(timeline.windows[rank][:, 0].tolist(), labels, strict=True)
            )
        )
        steps = tuple(
            StepOverlap(
                rank=rank, index=index, start=start, label=label, times=times, contention=contention
            )
            for (rank, index, start, label), times, contention in zip(
                names, totals.times, totals.contention.finish(), strict=True
            )
        )
        return TraceAnalysis(
            steps=steps,
            operators=totals.operators.rows(),
            num_events=buffer.num_rows,
            is_truncated=reader.is_truncated,
        )


class _Totals:
    """Totals that accumulate step by step."""

    def __init__(self, catalog: Catalog, device_ranks: set[int]) -> None:
        self._catalog = catalog
        self._device_ranks = device_ranks
        self._num_kept_spans = 0
        self.times: list[StepTimes] = []
        self.operators = OperatorTotals(catalog)
        self.contention = ContentionTotals(len(catalog.keys))

    def add(self, start: int, end: int, rank: int, events: EventTable) -> None:
        roles = StepRoles(events, self._catalog, has_device=rank in self._device_ranks)
        work = step_self_times(roles.work, start, end)
        launched = launches(roles.work, roles.launchers, self._catalog)
        times = step_times(roles, launched.moments, self._catalog, start, end)
        self.operators.add(work, launched, roles.host_ranges)
        self.contention.add(work, times.communicating + start)
        self._num_kept_spans += times.num_spans
        self.times.append(times if self._num_kept_spans <= _MAX_KEPT_SPANS else times.summary())


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


def step_subject(case: Mapping[str, CaseValue]) -> str:
    """Returns the subject under which the operators and allocations of a step are stored."""
    return (
        f"{case['model']}, batch {case['batch']}, context {case['context']}, "
        f"{case['precision']}, {case['attention']} attention, {case['phase']}"
    )


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
