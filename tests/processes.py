"""Looking at the processes that a test has started."""

import pathlib


def children_of(pid: int) -> list[int]:
    """Returns the processes that a process has started; none of one that has ended."""
    try:
        listed = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(each) for each in listed.split()]


def is_running(pid: int) -> bool:
    """Whether a process has not ended; a zombie has."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
