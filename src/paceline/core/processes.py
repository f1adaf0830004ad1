"""Processes: children that die with their parent, groups that end together, pauses and errors."""

import collections
import contextlib
import ctypes
import math
import os
import pathlib
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from paceline.core.lock import INHERITED, held_locks

_PR_SET_PDEATHSIG = 1
# Loaded at import: loading takes a lock, which a process must not do between fork and exec.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

STOPPED = 128 + signal.SIGTERM
"""Exit code of a process that stopped on request."""
HUNG_UP = 128 + signal.SIGHUP
"""Exit code of a command that stopped because its terminal was closed."""
STOP_CODES = (STOPPED, HUNG_UP)
ENDED_BY_REQUEST = (-signal.SIGTERM, -signal.SIGHUP)
"""Return codes of processes that were asked to stop before they could handle the signal."""
LOST_PEER = 75
"""Exit code of a process that found a peer of its group late or gone."""

# Time that the other processes of a group have to exit by themselves after one has failed.
TERMINATION_GRACE_S = 5.0
_POLL_INTERVAL_S = 0.005
_EXCEPTION = 1
"""Exit code of a Python program that ends with an uncaught exception."""
_BLAME_S = 2.0
"""Longest time that a process takes from closing its connections to exiting."""

_ERROR = "paceline: error: "
_LONGEST_ERROR = 300
_LINES_SEARCHED = 40


def start_child(
    command: Sequence[str], *, log: pathlib.Path | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Starts a program that dies with this process; `options` are those of `subprocess.Popen`.

    `log` is a file to append stdout and stderr to; the program then has no stdin. The program owns
    the directories that this process owns, until both have ended.
    """
    parent_pid = os.getpid()
    locks = held_locks()
    options["pass_fds"] = (*options.get("pass_fds", ()), *locks)
    options["env"] = {**options.get("env", os.environ), INHERITED: ",".join(map(str, locks))}
    with contextlib.ExitStack() as stack:
        if log is not None:
            options["stdin"] = subprocess.DEVNULL
            options["stdout"] = stack.enter_context(log.open("ab"))
            options["stderr"] = subprocess.STDOUT
        return subprocess.Popen(command, preexec_fn=lambda: die_with_parent(parent_pid), **options)


def error_tail(log: pathlib.Path, exit_code: int) -> str:
    """Returns the error that a program ended with, or else the last line of its log."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        last = collections.deque((line.strip() for line in lines if line.strip()), _LINES_SEARCHED)
    # Under the lab, lines are prefixed with the rank.
    errors = [line.partition(_ERROR)[2] for line in last if _ERROR in line]
    text = (errors or list(last) or ["it printed nothing"])[-1]
    return f"exit code {exit_code}: {text[:_LONGEST_ERROR]}"


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that request a stop of this process.

    They come from a scheduler, its advance warning, Ctrl-C, and a terminal that is closed; under
    nohup, which ignores the last, it requests nothing.
    """
    signals = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return signals


_hung_up = threading.Event()


def note_stop_request(number: int) -> None:
    """Notes that this process was asked to stop; stops using a terminal that was closed."""
    if number != signal.SIGHUP:
        return
    _hung_up.set()
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            # The next write to a closed terminal is an error, and would prevent saving.
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere, descriptor)
        os.close(nowhere)


def stop_code() -> int:
    """Returns the exit code of a process that was asked to stop.

    Ranks end with `STOPPED` whatever the request; who started them says what it was.
    """
    return HUNG_UP if _hung_up.is_set() and "RANK" not in os.environ else STOPPED


def back_off_s(num_failures: int, first_s: float, longest_s: float = math.inf) -> float:
    """Returns the pause before the next attempt: none at first, then doubled by every failure."""
    return min(first_s * 2 ** (num_failures - 1), longest_s) if num_failures > 0 else 0.0


def die_with_parent(parent_pid: int) -> None:
    """Makes the kernel kill this process when `parent_pid`, its parent, ends.

    A killed parent cannot clean up, and a worker blocked in a collective would wait forever.
    Linux only. Elsewhere this does nothing; daemonic workers still end with a parent that exits
    normally. The setting is not inherited by children of this process.
    """
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have exited before the call to prctl; then the signal would never be sent.
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_agent(environment: Mapping[str, str]) -> None:
    """Makes a rank that torchrun started die with its agent; torchrun does not do so itself."""
    if "TORCHELASTIC_RUN_ID" in environment and "RANK" in environment:
        die_with_parent(os.getppid())


def exit_code_of(return_code: int) -> int:
    """Converts a `Popen` return code to a shell exit code: a signal becomes 128 + its number."""
    return return_code if return_code >= 0 else 128 - return_code


class ForkedProcess:
    """A forked child with the interface of `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code, or minus the number of a fatal signal; None while running."""
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
        """Kills the process and waits until it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)


class SignalForwarder:
    """Context manager that collects stop signals for forwarding; on the main thread only."""

    def __init__(self) -> None:
        self._received: list[int] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._note) for each in stop_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _note(self, number: int, _frame: object) -> None:
        # A terminal sends SIGINT to the child processes as well. A second SIGINT would interrupt
        # their handling of the first.
        note_stop_request(number)
        self._received.append(signal.SIGTERM if number == signal.SIGINT else number)

    def send_to(self, processes: Iterable[subprocess.Popen[bytes] | ForkedProcess]) -> bool:
        """Forwards the signals received since the last call; returns whether there were any."""
        received, self._received = self._received, []
        for process in processes if received else ():
            for number in received:
                process.send_signal(number)
        return bool(received)

    def come_within(self, seconds: float) -> bool:
        """Waits up to `seconds` for a stop signal; returns whether one arrived."""
        deadline = time.monotonic() + seconds
        while not self._received and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL_S)
        return bool(self._received)


def wait_for_group(
    processes: Mapping[str, subprocess.Popen[bytes]], *, grace_s: float = TERMINATION_GRACE_S
) -> tuple[int, str | None]:
    """Waits until all processes end; terminates the others when one fails.

    A process that loses a peer exits with 1, as after any exception, or with `LOST_PEER`. It may
    exit before the failed peer does, because leaving the interpreter takes a moment. So the others
    get that moment too, and one that exits with any other failure is reported instead. A process
    that exits with 143 was asked to stop: the others then get `grace_s` seconds, the same as when
    this process receives a stop signal, which it forwards.

    Returns the exit code of the group, and the name of the process that failed first.
    """
    running = dict(processes)
    try:
        with SignalForwarder() as requests:
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
    requests: SignalForwarder,
    grace_s: float,
) -> tuple[str | None, int]:
    """Returns the name and exit code of the next failure; removes ended processes."""
    code, was_asked = 0, False
    while running:
        if deadline is not None and time.monotonic() >= deadline:
            return None, STOPPED if was_asked else code
        is_asked = requests.send_to(running.values())
        for name, process in list(running.items()):
            return_code = process.poll()
            if return_code is not None:
                del running[name]
            if return_code in STOP_CODES or (was_asked and return_code in ENDED_BY_REQUEST):
                is_asked, code = True, STOPPED
            elif return_code in (_EXCEPTION, LOST_PEER) and code == STOPPED:
                pass  # It lost a peer that stopped first.
            elif return_code:
                return None if was_asked else name, exit_code_of(return_code)
        if is_asked and not was_asked:
            was_asked, deadline = True, time.monotonic() + grace_s
        time.sleep(_POLL_INTERVAL_S)
    return None, code


def end_processes(
    processes: Sequence[subprocess.Popen[bytes]], *, grace_s: float = TERMINATION_GRACE_S
) -> None:
    """Terminates processes, and kills those that do not end within `grace_s` seconds."""
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


def end_group(process: subprocess.Popen[bytes], *, grace_s: float = TERMINATION_GRACE_S) -> None:
    """Ends the leader of a session and its descendants; SIGTERM first, so that it can clean up."""
    end_processes([process], grace_s=grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def ignore_sigint() -> Iterator[None]:
    """Makes processes that are started inside the context ignore Ctrl-C.

    A terminal sends SIGINT to the parent and its children. The parent handles it and ends the
    children; they would only print tracebacks, especially while they are still importing.
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
    """Turns requests to stop into SystemExit(143) or, for SIGHUP, (129), so that `finally` runs."""

    def leave(number: int, _frame: object) -> None:
        note_stop_request(number)
        raise SystemExit(STOPPED)

    requests = [each for each in stop_signals() if each != signal.SIGINT]
    previous = {each: signal.signal(each, leave) for each in requests}
    try:
        yield
    except SystemExit as leaving:
        if leaving.code == STOPPED:
            raise SystemExit(stop_code()) from None
        raise
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
