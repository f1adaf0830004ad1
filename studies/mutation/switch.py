"""Says whether a mutant is active; copied into the instrumented package as ``mutants_``.

The active mutant stands in a file that all processes of a test share, ranks and commands included.
Every mutant that a process passes is noted in the same file.
"""

import mmap
import os

SWITCH = "PACELINE_MUTANTS"
"""Environment variable with the path of the shared file."""
NOTES = 8
"""Offset of the notes: one byte per mutant, by number."""

_path = os.environ.get(SWITCH)
if _path is None:
    _shared = memoryview(bytearray(1 << 20))
else:
    with open(_path, "r+b") as _file:  # noqa: PTH123  # Loads nothing that tests replace.
        _shared = memoryview(mmap.mmap(_file.fileno(), 0))
_active = _shared[:NOTES].cast("Q")


def hit(number: int) -> bool:
    """Notes that a mutant was passed, and returns whether it is active."""
    _shared[NOTES + number] = 1
    return _active[0] == number
