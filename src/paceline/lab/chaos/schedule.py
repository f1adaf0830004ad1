"""Which fault comes when: drawn from a seed before anything starts."""

import dataclasses
import heapq
import random
from collections.abc import Iterator, Mapping
from typing import Literal

from paceline.core.errors import UsageError

FaultKind = Literal["kill", "stop", "link-down", "link-slow", "link-loss", "disk-full", "corrupt"]
LINK_FAULTS: tuple[FaultKind, ...] = ("link-down", "link-slow", "link-loss")
# Between half and one and a half times the period, so that faults do not keep step with the run.
_JITTER = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """How often a kind of fault comes, and how long it lasts."""

    every_s: float
    lasts_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.every_s > 0 or self.lasts_s < 0:
            raise UsageError("a fault needs a positive period and no negative duration")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that is due."""

    number: int
    """From 1, in the order of time."""
    kind: FaultKind
    due_s: float
    """Seconds after the beginning."""
    lasts_s: float
    choice: float
    """From 0 to 1: which of the targets that are there then."""


def schedule(kinds: Mapping[FaultKind, Kind], *, seed: int, for_s: float) -> Iterator[Fault]:
    """Yields the faults of a run in the order of time; the same seed gives the same.

    Args:
        kinds: The kinds that occur.
        seed: Decides on times and targets.
        for_s: No fault is due after this.
    """
    # Each kind has a stream of its own: leaving one out does not move the others.
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
