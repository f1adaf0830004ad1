"""Processes that do not outlive their reason to exist, and groups that end together."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

_PR_SET_PDEATHSIG = 1
# Loaded here, because a process between fork and exec must not take a lock to load it.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""What asks processes to stop: a scheduler, its warning, and Ctrl-C."""
STOPPED = 128 + signal.SIGTERM
"""The exit code of a process that was asked to stop, and has."""
LOST_PEER = 75
"""The exit code of a process that has found one of its group late or gone."""

# How long the others may take to end by themselves once one of a group has failed.
TERMINATION_GRACE_S = 5.0
_POLL_INTERVAL_S = 0.005
_EXCEPTION = 1
"""The exit code of a Python program that an exception ended."""
_BLAME_S = 2.0
"""How long a process may take from closing its connections to its end."""


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when `parent_pid`, its parent, ends.

    A killed parent cannot clean up, and a worker that waits in a collective would wait
    for ever. Linux only: elsewhere nothing happens, and daemonic workers still end with a
    parent that exits in an orderly way. It does not reach what this process starts in turn.
    """
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have gone before the request was made; then nobody will send the signal.
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_agent(environment: Mapping[str, str]) -> None:
    """Lets a rank that torchrun has started die with its agent, which does not see to that.

    Args:
        environment: The process's variables.
    """
    if "TORCHELASTIC_RUN_ID" in environment and "RANK" in environment:
        die_with_parent(os.getppid())


def exit_code_of(return_code: int) -> int:
    """Turns what `Popen` returns into what a shell would: a signal becomes 128 + its number."""
    return return_code if return_code >= 0 else 128 - return_code


class Signalled(Protocol):
    """A process that takes signals."""

    def send_signal(self, number: int, /) -> None:
        """Sends one, unless the process has ended."""


class PassedOn:
    """Notes requests to stop while it is open, to be passed on; on the main thread only."""

    def __init__(self) -> None:
        self._received: list[int] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._note) for each in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _note(self, number: int, _frame: object) -> None:
        # A terminal sends SIGINT to the processes as well, and a second one would interrupt how
        # they answer the first.
        self._received.append(signal.SIGTERM if number == signal.SIGINT else number)

    def send_to(self, processes: Iterable[Signalled]) -> bool:
        """Sends what has come since the last time, and says whether anything has."""
        received, self._received = self._received, []
        for process in processes if received else ():
            for number in received:
                process.send_signal(number)
        return bool(received)

    def come_within(self, seconds: float) -> bool:
        """Waits, and says whether a request has come by then; returns when it comes."""
        deadline = time.monotonic() + seconds
        while not self._received and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL_S)
        return bool(self._received)


class ForkedProcess:
    """A child that was forked, with what `Popen` has.

    Args:
        pid: Of the child.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code, minus the signal's number if one ended it; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int, /) -> None:
        """Sends a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends the process, and waits until it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)


def wait_for_group(
    processes: Mapping[str, subprocess.Popen[bytes]], *, grace_s: float = TERMINATION_GRACE_S
) -> tuple[int, str | None]:
    """Waits until all processes end; the first that fails ends the others.

    A process that loses a peer ends with 1, as after any exception, and may end before the peer
    has: it takes a moment to leave the interpreter. So others get that moment too, and who ended
    otherwise is to blame. One that ends with 143 was asked to stop: the others get the same time
    for it that they get when this process is asked, which passes the signal on.

    Args:
        processes: By name.
        grace_s: How long they may take to stop when they are asked to.

    Returns the exit code of the group, and the name of the process that failed first.
    """
    running = dict(processes)
    try:
        with PassedOn() as requests:
            name, code = _next_failure(running, None, requests, grace_s)
            if code in (_EXCEPTION, LOST_PEER):
                deadline = time.monotonic() + _BLAME_S
                while running and time.monotonic() < deadline:
                    other, its_code = _next_failure(running, deadline, requests, grace_s)
                    if its_code not in (0, STOPPED, _EXCEPTION, LOST_PEER):
                        return its_code, other
            return code, name
    finally:
        end_processes(list(running.values()))


def _next_failure(
    running: dict[str, subprocess.Popen[bytes]],
    deadline: float | None,
    requests: PassedOn,
    grace_s: float,
) -> tuple[str | None, int]:
    """Waits for a process that fails, and returns its name and exit code; takes away who ended."""
    code, was_asked = 0, False
    while running:
        if deadline is not None and time.monotonic() >= deadline:
            return None, STOPPED if was_asked else code
        is_asked = requests.send_to(running.values())
        for name, process in list(running.items()):
            return_code = process.poll()
            if return_code is not None:
                del running[name]
            if return_code == STOPPED or (was_asked and return_code == -signal.SIGTERM):
                is_asked, code = True, STOPPED
            elif return_code in (_EXCEPTION, LOST_PEER) and code == STOPPED:
                pass  # It has lost a peer that did not wait for it.
            elif return_code:
                return None if was_asked else name, exit_code_of(return_code)
        if is_asked and not was_asked:
            was_asked, deadline = True, time.monotonic() + grace_s
        time.sleep(_POLL_INTERVAL_S)
    return None, code


def end_processes(
    processes: Sequence[subprocess.Popen[bytes]], *, grace_s: float = TERMINATION_GRACE_S
) -> None:
    """Asks processes to end, and kills those that do not within `grace_s` seconds."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + grace_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Lets processes that are started while it is open never hear of a Ctrl-C.

    A terminal sends it to parent and children alike. The parent answers it and ends them; they
    would only add tracebacks, above all while they are still importing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def termination_as_exit() -> Iterator[None]:
    """Turns SIGTERM and SIGUSR1 into SystemExit(143) while it is open: `finally` blocks run."""

    def leave(_signal: int, _frame: object) -> None:
        raise SystemExit(STOPPED)

    previous = {each: signal.signal(each, leave) for each in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
