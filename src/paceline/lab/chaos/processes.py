"""The command under chaos and its processes: all of them and no others.

The command is started with a unique environment variable, which all of its descendants inherit. A
process can therefore be identified even after its parents have exited. A process without the
variable is never touched.
"""

import os
import pathlib
import secrets
import signal
import subprocess
import time
from collections.abc import Sequence

from paceline.core.processes import exit_code_of, start_child
from paceline.lab.network import Host
from paceline.lab.run import rank_environment

MARK = "PACELINE_CHAOS"
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_GROUP_ENDS_S = 15.0
"""Time for the other ranks to end after a rank on another host has failed."""


class Command:
    """A command and its processes: one on this machine, or one per host.

    Args:
        words: The program and its arguments.
        mark: The value that identifies its processes.
        hosts: Hosts of the lab, each with one rank; none to run on this machine.
    """

    def __init__(self, words: Sequence[str], mark: str, hosts: Sequence[Host] = ()) -> None:
        self._words = list(words)
        self._mark = mark
        self._hosts = list(hosts)
        self._running: list[subprocess.Popen[bytes]] = []
        self.starts = 0

    def start(self) -> None:
        """Starts the command; its output goes to our own stdout and stderr."""
        self.starts += 1
        environment = {**os.environ, MARK: self._mark}
        if not self._hosts:
            # In a new session Ctrl-C reaches only this process, which then ends the command.
            self._running = [start_child(self._words, env=environment, start_new_session=True)]
            return
        self._running = [
            start_child(
                host.command(self._words),
                env={**environment, **rank_environment(self._hosts, host.index, 1)},
                start_new_session=True,
            )
            for host in self._hosts
        ]

    def exit_code(self) -> int | None:
        """Returns the exit code, or None while running; a failed rank ends its group."""
        codes = [process.poll() for process in self._running]
        failed = [code for code in codes if code]
        if failed:
            if None in codes:
                end_all(self._mark, _GROUP_ENDS_S)
                for process in self._running:
                    process.wait()
            return exit_code_of(failed[0])
        return None if None in codes else 0

    def terminate(self) -> None:
        """Sends SIGTERM to all running processes."""
        for process in self._running:
            if process.poll() is None:
                process.terminate()


def new_mark() -> str:
    """Returns a unique value for `MARK`."""
    return secrets.token_hex(8)


def marked_processes(mark: str) -> list[int]:
    """Returns the live processes that carry the mark, sorted by pid."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            # A zombie has no environment, so it is not found.
            if wanted in environment:
                found.append(int(entry.name))
    return sorted(found)


def ranks_of(mark: str) -> list[int]:
    """Returns the marked processes that train: those without children, except helpers."""
    marked = marked_processes(mark)
    parents = {_parent(pid) for pid in marked}
    leaves = [pid for pid in marked if pid not in parents]
    return [
        pid for pid in leaves if not any(helper in _command(pid) for helper in _HELPERS)
    ] or leaves


def send(pid: int, number: signal.Signals, mark: str) -> bool:
    """Sends a signal to a process that still carries the mark; returns whether it was sent."""
    if pid not in marked_processes(mark):
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def end_all(mark: str, within_s: float) -> list[int]:
    """Waits up to `within_s`, kills the remaining processes, and returns those killed."""
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
