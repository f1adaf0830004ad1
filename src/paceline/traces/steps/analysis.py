"""Analyses where the time of a trace went, in bounded memory.

Phases: the trace is read once, its events are written to disk as integers, and its steps are found
(ranges named ``paceline::step``, or the profiler's own; without either, the whole trace is one
step). The events are then divided by step, and each step of each rank is analysed separately.
Totals over all steps accumulate meanwhile: time by operator, and operator times with and without
communication in flight.
"""

import dataclasses
import pathlib
from collections.abc import Callable

from paceline.traces.events.catalog import EVENT, Catalog, EventTable
from paceline.traces.events.reader import Event, TraceReader
from paceline.traces.events.spool import Spool, StepSpool
from paceline.traces.steps.contention import ContentionTotals
from paceline.traces.steps.operators import OperatorTime, OperatorTotals
from paceline.traces.steps.overlap import StepRoles, StepTimes, step_times
from paceline.traces.steps.self_time import step_self_times
from paceline.traces.steps.timeline import Timeline

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
    with Spool(EVENT) as spool:
        for events in reader:
            spool.append(catalog.number(events))
            on_progress(reader.num_bytes)
        timeline = Timeline(spool, catalog, path)
        totals = _Totals(catalog, timeline.device_ranks)
        with StepSpool(spool, catalog.rank_of_thread(), timeline.windows) as by_step:
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
            num_events=spool.num_rows,
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
        times = step_times(roles, self._catalog, start, end)
        self.operators.add(work, roles.ranges)
        self.contention.add(work, times.communicating + start)
        self._num_kept_spans += times.num_spans
        self.times.append(times if self._num_kept_spans <= _MAX_KEPT_SPANS else times.summary())
