"""Heartbeats of ranks, in memory shared with the supervisor.

A rank writes its phase and step, which takes a fraction of a microsecond. The last heartbeat of a
killed rank remains: it shows in which phase of which step the rank died. A rank without a
supervisor writes to private memory.
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
    """The phase of training that a rank is in."""

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
    """A rank's concurrent work on a checkpoint."""

    NOTHING = 0
    WRITE = 1
    PUBLISH = 2

    def __str__(self) -> str:
        return self.name.lower()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The last heartbeat of a rank."""

    phase: Phase
    writing: Writing
    is_final: bool
    """Whether the rank reports that a restart would fail in the same way."""
    step: int
    """Completed steps of the run."""
    num_steps: int
    """Steps of the run completed by this process."""
    time_s: float
    """Time of the heartbeat, on the monotonic clock that all processes of a host share."""


# Every field is eight bytes, stored in one write, so a reader never sees half of a number. (Nor the
# temporary zeros that `struct.pack_into` writes.)
_TIME, _PHASE, _WRITING, _FINAL, _STEP, _NUM_STEPS = range(6)
_FIELDS = 8  # One cache line per rank, to avoid false sharing.
_SLOT_BYTES = 8 * _FIELDS

_MEMORY_NAME = "paceline-heartbeats"


class Heartbeats:
    """The heartbeats of all ranks of a host."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def for_ranks(cls, num_ranks: int) -> Self:
        """Creates memory that is shared with processes forked from this one."""
        if sys.platform != "linux":
            return cls(mmap.mmap(-1, num_ranks * _SLOT_BYTES))
        # An anonymous file, which other processes can find through /proc and observe.
        descriptor = os.memfd_create(_MEMORY_NAME)
        os.ftruncate(descriptor, num_ranks * _SLOT_BYTES)
        return cls(mmap.mmap(descriptor, 0))

    @classmethod
    def of_process(cls, pid: int) -> Self:
        """Opens the heartbeats of another process of this user, to observe them."""
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
        """Clears all heartbeats, before new ranks start."""
        for rank in range(len(self)):
            slot = self._slot(rank)
            for field in range(_FIELDS):
                slot.numbers[field] = 0
            slot.times[_TIME] = time.monotonic()

    def become(self, rank: int) -> None:
        """Makes this process write the heartbeat of a rank."""
        global _own
        _own = self._slot(rank)

    def _slot(self, rank: int) -> "_Slot":
        return _Slot(memoryview(self._memory)[rank * _SLOT_BYTES : (rank + 1) * _SLOT_BYTES])


class _Slot:
    """The fields of one rank, viewed as integers and as floats."""

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
"""The slot that this process writes."""


def own_heartbeat() -> Heartbeat:
    """Returns the last heartbeat of this process, for a thread that monitors another thread."""
    return _own.read()


def beat(phase: Phase) -> None:
    """Records that this rank enters a phase."""
    _own.numbers[_PHASE] = phase
    _own.times[_TIME] = time.monotonic()


def beat_step(step: int, num_steps: int) -> None:
    """Records the completed steps of the run, and those completed by this process."""
    _own.numbers[_STEP] = step
    _own.numbers[_NUM_STEPS] = num_steps


def beat_writing(writing: Writing) -> None:
    """Records this rank's work on a checkpoint, on any thread."""
    _own.numbers[_WRITING] = writing


def beat_final() -> None:
    """Records that a restart of this rank would fail in the same way."""
    _own.numbers[_FINAL] = True
