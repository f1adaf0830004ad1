"""The schedule of a pipeline's stages, and the reasons for their idle time.

For a step on p ranks, T is the time from the first forward of any stage to the end of the last
backward, and W is the total work of all stages, excluding waits:

    idle          p T - W = bubble + imbalance
    bubble        order bubble + messages: the measured bubble, compared with (p - 1) / (v m)
    order bubble  idle time if messages took no time and all forwards had the same duration, as had
                  all backwards: every piece of work begins as soon as its rank is free and the
                  piece that it needs has ended, in the order of the trace
    imbalance     idle time added to the order bubble by the real durations of the pieces, with
                  messages that take no time
    messages      exposed communication: sends and late receives

all as shares of W. The bubble of 1F1B is (p - 1) / (v m) for m micro-batches and v stages on every
rank. The order bubble equals that number whenever torch kept the order of 1F1B; the measured bubble
also includes the real waits.
"""

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from paceline.core.ranges import PipelineRange, pipeline_range, short_name
from paceline.core.units import NANOSECOND
from paceline.traces.analysis import StepOverlap
from paceline.traces.reader import TraceError


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageWork:
    """A piece of work of one rank; times are seconds from the first piece of the step."""

    rank: int
    what: PipelineRange
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Duration in seconds."""
        return self.end_s - self.start_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """A step of a pipeline: the work of all of its ranks, ordered by start."""

    label: str
    work: tuple[StageWork, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that did any work."""
        return tuple(sorted({piece.rank for piece in self.work}))

    @property
    def duration_s(self) -> float:
        """Seconds from the first piece of work to the end of the last."""
        return max(piece.end_s for piece in self.work)

    @property
    def work_s(self) -> float:
        """Total work of all ranks in seconds."""
        return sum(piece.duration_s for piece in self.work)

    @property
    def idle(self) -> float:
        """Idle time over work."""
        return self._idle(self.duration_s)

    @property
    def bubble(self) -> float:
        """Idle time over work, excluding imbalance: order bubble and exposed communication."""
        return self.idle - self.imbalance

    @functools.cached_property
    def order_bubble(self) -> float:
        """Idle time over work, if messages took no time and stages had equal work."""
        return self._idle(_end_without_messages(self.work, _equal_durations(self.work)))

    @functools.cached_property
    def imbalance(self) -> float:
        """Idle time over work due to unequal durations of pieces of work."""
        durations = [piece.duration_s for piece in self.work]
        return self._idle(_end_without_messages(self.work, durations)) - self.order_bubble

    @property
    def messages(self) -> float:
        """Idle time over work due to exposed communication."""
        return self.bubble - self.order_bubble

    def _idle(self, duration_s: float) -> float:
        return len(self.ranks) * duration_s / self.work_s - 1


def pipeline_steps(
    steps: Sequence[StepOverlap], ranks: Collection[int]
) -> tuple[PipelineStep, ...]:
    """Returns the steps of the pipeline on `ranks`, with their work.

    Other ranks of the trace may run the same stages on other data.
    """
    # All ranks run the same steps in the same order.
    found: dict[tuple[int, str], list[tuple[int, int, int, PipelineRange]]] = {}
    for step in (step for step in steps if step.rank in ranks):
        for span in step.times.ranges:
            if (what := pipeline_range(span.name)) is not None:
                piece = (step.start + span.start, step.start + span.end, step.rank, what)
                found.setdefault((step.index, step.label), []).append(piece)
    return tuple(
        PipelineStep(label=label, work=_from_first(pieces)) for (_, label), pieces in found.items()
    )


def _from_first(pieces: list[tuple[int, int, int, PipelineRange]]) -> tuple[StageWork, ...]:
    pieces = sorted(pieces, key=lambda piece: piece[:3])
    first = pieces[0][0]
    return tuple(
        StageWork(
            rank=rank,
            what=what,
            start_s=(start - first) * NANOSECOND,
            end_s=(end - first) * NANOSECOND,
        )
        for start, end, rank, what in pieces
    )


def _equal_durations(work: Sequence[StageWork]) -> list[float]:
    """Returns the duration of each piece if all pieces of a phase were equally long.

    The loss, which only the last stage computes, is spread over all forwards.
    """
    totals: dict[str, float] = defaultdict(float)
    numbers: Counter[str] = Counter()
    for piece in work:
        phase = piece.what.phase
        totals["forward" if phase == "loss" else phase] += piece.duration_s
        numbers[phase] += 1
    phases = [piece.what.phase for piece in work]
    return [0.0 if phase == "loss" else totals[phase] / numbers[phase] for phase in phases]


def _end_without_messages(work: Sequence[StageWork], durations: Sequence[float]) -> float:
    """Returns the end of the last piece of work if messages took no time.

    Each rank keeps the order of `work`, whose pieces take these `durations`.
    """
    last_stage = max(piece.what.stage for piece in work)
    free: dict[int, float] = {}
    ended: dict[PipelineRange, float] = {}
    # A piece starts after the pieces that it depends on, so one pass in this order is enough.
    for piece, duration in zip(work, durations, strict=True):
        phase, stage, micro_batch = piece.what
        needed = None
        if phase == "forward" and stage > 0:
            needed = PipelineRange("forward", stage - 1, micro_batch)
        elif phase == "backward" and stage < last_stage:
            needed = PipelineRange("backward", stage + 1, micro_batch)
        if needed is not None and needed not in ended:
            raise TraceError(
                f"rank {piece.rank} begins {short_name(piece.what.name)} before "
                f"{short_name(needed.name)}, which it needs; the clocks of the ranks differ, or "
                "the trace is incomplete: trace again"
            )
        ready = 0.0 if needed is None else ended[needed]
        end = max(free.get(piece.rank, 0.0), ready) + duration
        free[piece.rank] = ended[piece.what] = end
    return max(free.values())
