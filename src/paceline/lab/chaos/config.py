"""Configuration of a chaos run: the command, its faults and the time limits.

The times and targets of all faults are drawn from a seed before the run starts.
"""

import dataclasses
import heapq
import pathlib
import random
from collections.abc import Iterator, Mapping

from paceline.core.errors import UsageError
from paceline.lab.chaos.faults import FAULTS, Fault

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


def schedule(kinds: Mapping[str, Kind], *, seed: int, for_s: float) -> Iterator[Fault]:
    """Yields the faults of the first `for_s` seconds in chronological order."""
    # Each kind has its own random stream, so that omitting one does not change the others.
    streams = [
        _stream(kind, settings, random.Random(f"{seed} {kind}"), for_s)
        for kind, settings in kinds.items()
    ]
    merged = heapq.merge(*streams, key=lambda fault: fault.due_s)
    for number, fault in enumerate(merged, start=1):
        yield dataclasses.replace(fault, number=number)


def _stream(kind: str, settings: Kind, chance: random.Random, for_s: float) -> Iterator[Fault]:
    due_s = 0.0
    while True:
        due_s += settings.every_s * chance.uniform(1 - _JITTER, 1 + _JITTER)
        if due_s >= for_s:
            return
        yield Fault(
            number=0, kind=kind, due_s=due_s, lasts_s=settings.lasts_s, choice=chance.random()
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    """A run, its faults, and the limits of both."""

    command: tuple[str, ...]
    run: pathlib.Path
    """Directory of the run, `out` of its config."""
    kinds: Mapping[str, Kind]
    """The kinds of faults to inject, by their names in `FAULTS`."""
    for_s: float
    """How long to inject faults; the run is then left to finish."""
    finish_within_s: float = 600.0
    """Time that the run may take to finish after the faults."""
    recover_within_s: float = 120.0
    """Time for the next step after a fault; a fault without a next step counts as lost."""
    steps_between: int = 10
    """Steps that the run must complete after a fault before the next one is injected."""
    seed: int = 0
    any_process: bool = False
    """Whether launchers and helper processes are also killed and stopped, not only ranks."""
    restart: bool = True
    """Whether the command is restarted when it fails."""
    num_hosts: int = 0
    """Hosts of the lab, with one rank each; 0 to run on this machine, where no link can fail."""
    disk_bytes: int = 0
    """Size of the disk that is mounted for the run; 0 for none."""
    reference: pathlib.Path | None = None
    """Directory of an undisturbed run, whose losses must be bit-identical to those of this run."""

    def __post_init__(self) -> None:
        if not self.command:
            raise UsageError("nothing to run: put the command after --")
        if not self.kinds:
            raise UsageError("no fault to inject; ask for at least one, such as --kill-every 30s")
        if not (self.for_s > 0 and self.finish_within_s > 0 and self.recover_within_s > 0):
            raise UsageError("--for, --finish-within and --recover-within must be positive")
        if self.steps_between < 1:
            raise UsageError("--steps-between must be at least 1")
        if self.num_hosts < 2 and any(FAULTS[kind].needs_links for kind in self.kinds):
            raise UsageError("link faults need links between virtual hosts; add --hosts 2")
