"""The processes of a command, all of them and no others.

The command starts with a variable in its environment that nothing else has. Whatever it starts
inherits it, so that a process can be told even when its parents are gone; a process without it is
never touched.
"""

import os
import pathlib
import secrets
import signal
import time
from collections.abc import Sequence

MARK = "PACELINE_CHAOS"
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def new_mark() -> str:
    """Returns a value for `MARK` that no other run has."""
    return secrets.token_hex(8)


def marked_processes(mark: str) -> list[int]:
    """Returns the processes that carry the mark and have not ended, by number."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            # A zombie has no environment any more.
            if wanted in environment:
                found.append(int(entry.name))
    return sorted(found)


def ranks_of(mark: str) -> list[int]:
    """Returns the marked processes that train: those without children of their own."""
    marked = marked_processes(mark)
    parents = {_parent(pid) for pid in marked}
    leaves = [pid for pid in marked if pid not in parents]
    return [
        pid for pid in leaves if not any(helper in _command(pid) for helper in _HELPERS)
    ] or leaves


def send(pid: int, number: signal.Signals, mark: str) -> bool:
    """Sends a signal to a process if it still carries the mark; returns whether it does."""
    if pid not in marked_processes(mark):
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def end_all(mark: str, within_s: float) -> list[int]:
    """Kills what is left of a command; returns what was there after waiting for it to end."""
    deadline = time.monotonic() + within_s
    left: Sequence[int] = marked_processes(mark)
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = marked_processes(mark)
    orphans = list(left)
    for pid in orphans:
        send(pid, signal.SIGCONT, mark)
        send(pid, signal.SIGKILL, mark)
    return orphans


def _parent(pid: int) -> int | None:
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])


def _command(pid: int) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
