"""Schedules faults: their times and targets are drawn from a seed before the run starts."""

import dataclasses
import heapq
import random
from collections.abc import Iterator, Mapping
from typing import Literal

from paceline.core.errors import UsageError

FaultKind = Literal["kill", "stop", "link-down", "link-slow", "link-loss", "disk-full", "corrupt"]
LINK_FAULTS: tuple[FaultKind, ...] = ("link-down", "link-slow", "link-loss")
# Periods vary between half and one and a half times, so that faults do not synchronise with steps.
_JITTER = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Period and duration of one kind of fault."""

    every_s: float
    lasts_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.every_s > 0 or self.lasts_s < 0:
            raise UsageError("a fault needs a positive period and no negative duration")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A scheduled fault."""

    number: int
    """Number from 1, in chronological order."""
    kind: FaultKind
    due_s: float
    """Seconds since the start."""
    lasts_s: float
    choice: float
    """Number in [0, 1) that selects among the targets available at that time."""


def schedule(kinds: Mapping[FaultKind, Kind], *, seed: int, for_s: float) -> Iterator[Fault]:
    """Yields the faults of a run in chronological order; deterministic for a given seed.

    Args:
        kinds: The kinds of faults to inject.
        seed: Determines times and targets.
        for_s: Time limit; no fault is scheduled after it.
    """
    # Each kind has its own random stream, so that omitting one does not change the others.
    streams = [
        _stream(kind, settings, random.Random(f"{seed} {kind}"), for_s)
        for kind, settings in kinds.items()
    ]
    merged = heapq.merge(*streams, key=lambda fault: fault.due_s)
    for number, fault in enumerate(merged, start=1):
        yield dataclasses.replace(fault, number=number)


def _stream(
    kind: FaultKind, settings: Kind, chance: random.Random, for_s: float
) -> Iterator[Fault]:
    due_s = 0.0
    while True:
        due_s += settings.every_s * chance.uniform(1 - _JITTER, 1 + _JITTER)
        if due_s >= for_s:
            return
        yield Fault(
            number=0, kind=kind, due_s=due_s, lasts_s=settings.lasts_s, choice=chance.random()
        )
