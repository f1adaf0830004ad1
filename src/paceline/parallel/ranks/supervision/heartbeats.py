"""Signs of life of ranks, in memory that they share with the process that watches them.

A rank writes where it is, a fraction of a microsecond each time. What a killed rank has written
stays: it says in which phase of which step it died. A rank that nobody watches writes for itself.
"""

import dataclasses
import enum
import mmap
import os
import pathlib
import sys
import time
from typing import Self


class Phase(enum.IntEnum):
    """What a rank is doing."""

    START = 0
    RENDEZVOUS = 1
    LOAD = 2
    DATA = 3
    FORWARD = 4
    BACKWARD = 5
    ALL_REDUCE = 6
    UPDATE = 7
    EVALUATION = 8
    SAVE = 9
    END = 10

    def __str__(self) -> str:
        return self.name.lower().replace("_", "-")


class Writing(enum.IntEnum):
    """What a rank does about a checkpoint meanwhile."""

    NOTHING = 0
    WRITE = 1
    PUBLISH = 2

    def __str__(self) -> str:
        return self.name.lower()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The last sign of life of a rank."""

    phase: Phase
    writing: Writing
    is_final: bool
    """Whether the rank says that starting it again is of no use."""
    step: int
    """Steps of the run that are done."""
    num_steps: int
    """Of these, steps that this process has done."""
    time_s: float
    """When, on the clock that all processes of a host share."""


# Every field is eight bytes that are stored at once: who reads never sees half of a number. (Nor
# zeros in between, which `struct.pack_into` leaves for a moment.)
_TIME, _PHASE, _WRITING, _FINAL, _STEP, _NUM_STEPS = range(6)
_FIELDS = 8  # A cache line per rank, so that ranks do not slow each other down.
_SLOT_BYTES = 8 * _FIELDS

_MEMORY_NAME = "paceline-heartbeats"


class Heartbeats:
    """The heartbeats of all ranks of a host.

    Args:
        memory: Shared with the ranks.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def for_ranks(cls, num_ranks: int) -> Self:
        """Makes memory that processes share which are forked from this one."""
        if sys.platform != "linux":
            return cls(mmap.mmap(-1, num_ranks * _SLOT_BYTES))
        # In a file without a place, so that others can find it and look on.
        descriptor = os.memfd_create(_MEMORY_NAME)
        os.ftruncate(descriptor, num_ranks * _SLOT_BYTES)
        return cls(mmap.mmap(descriptor, 0))

    @classmethod
    def of_process(cls, pid: int) -> Self:
        """Opens the memory of another process of this user, to look on."""
        for path in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            if _MEMORY_NAME in str(path.readlink()):
                with path.open("r+b") as file:
                    return cls(mmap.mmap(file.fileno(), 0))
        raise FileNotFoundError(f"process {pid} has no heartbeats")

    def __len__(self) -> int:
        return len(self._memory) // _SLOT_BYTES

    def __getitem__(self, rank: int) -> Heartbeat:
        return self._slot(rank).read()

    def reset(self) -> None:
        """Forgets what was written: new ranks are about to start."""
        for rank in range(len(self)):
            slot = self._slot(rank)
            for field in range(_FIELDS):
                slot.numbers[field] = 0
            slot.times[_TIME] = time.monotonic()

    def become(self, rank: int) -> None:
        """Lets this process write as one of the ranks."""
        global _own
        _own = self._slot(rank)

    def _slot(self, rank: int) -> "_Slot":
        return _Slot(memoryview(self._memory)[rank * _SLOT_BYTES : (rank + 1) * _SLOT_BYTES])


class _Slot:
    """The fields of one rank, as whole numbers and as floating-point ones."""

    def __init__(self, memory: memoryview) -> None:
        self.numbers = memory.cast("q")
        self.times = memory.cast("d")

    def read(self) -> Heartbeat:
        return Heartbeat(
            phase=Phase(self.numbers[_PHASE]),
            writing=Writing(self.numbers[_WRITING]),
            is_final=bool(self.numbers[_FINAL]),
            step=self.numbers[_STEP],
            num_steps=self.numbers[_NUM_STEPS],
            time_s=self.times[_TIME],
        )


_own = _Slot(memoryview(bytearray(_SLOT_BYTES)))
"""Where this process writes."""


def own_heartbeat() -> Heartbeat:
    """Returns the last sign of life of this process, for a thread that looks at another."""
    return _own.read()


def beat(phase: Phase) -> None:
    """Says what this rank begins to do."""
    _own.numbers[_PHASE] = phase
    _own.times[_TIME] = time.monotonic()


def beat_step(step: int, num_steps: int) -> None:
    """Says how many steps of the run are done, and how many of them by this process."""
    _own.numbers[_STEP] = step
    _own.numbers[_NUM_STEPS] = num_steps


def beat_writing(writing: Writing) -> None:
    """Says what this rank begins to do about a checkpoint, on whichever thread."""
    _own.numbers[_WRITING] = writing


def beat_final() -> None:
    """Says that starting this rank again is of no use: it would end in the same way."""
    _own.numbers[_FINAL] = True
