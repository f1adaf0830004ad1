"""Processes that do not outlive their reason to exist, and groups that end together."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

_PR_SET_PDEATHSIG = 1
# Loaded here, because a process between fork and exec must not take a lock to load it.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

# How long the others may take to end by themselves once one of a group has failed.
_TERMINATION_GRACE_S = 5.0
_POLL_INTERVAL_S = 0.005


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


def exit_code_of(return_code: int) -> int:
    """Turns what `Popen` returns into what a shell would: a signal becomes 128 + its number."""
    return return_code if return_code >= 0 else 128 - return_code


def wait_for_group(processes: Mapping[str, subprocess.Popen[bytes]]) -> tuple[int, str | None]:
    """Waits until all processes end; the first that fails ends the others.

    Returns the exit code of the group, and the name of the process that failed first.
    """
    running = dict(processes)
    try:
        while running:
            for name, process in list(running.items()):
                return_code = process.poll()
                if return_code is None:
                    continue
                del running[name]
                if return_code != 0:
                    return exit_code_of(return_code), name
            time.sleep(_POLL_INTERVAL_S)
        return 0, None
    finally:
        end_processes(list(running.values()))


def end_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Asks processes to end, and kills those that do not within a few seconds."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _TERMINATION_GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def termination_as_exit() -> Iterator[None]:
    """Turns SIGTERM into SystemExit(143) while it is open, so that `finally` blocks run."""

    def leave(_signal: int, _frame: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
