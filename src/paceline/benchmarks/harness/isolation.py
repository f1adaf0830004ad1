"""Each case in a process of its own, with a memory limit and a time limit.

Linux answers memory exhaustion with SIGKILL: a case that may run out must not take the
sweep with it. A fresh process also means that no case inherits another's caches, compiled
code or peak. The child's stdout is its stderr, so that only records reach ours.
"""

import dataclasses
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Generic, Literal, TypeVar

from paceline.core.errors import is_out_of_memory
from paceline.core.processes import deaf_to_interrupts, die_with_parent
from paceline.core.units import format_binary_bytes

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class IsolatedRun(Generic[Result]):
    """What became of a case: its result, or why there is none."""

    outcome: Literal["ok", "out_of_memory", "failed", "timeout"]
    result: Result | None = None
    reason: str | None = None


def run_isolated(
    function: Callable[[Any, Callable[[int, int], None]], Result],
    argument: Any,
    *,
    memory_limit_bytes: int | None,
    timeout_s: float,
    on_progress: Callable[[int, int], None] = lambda _completed, _total: None,
) -> IsolatedRun[Result]:
    """Runs ``function(argument, on_progress)`` in a child process.

    `memory_limit_bytes` bounds the child's own data, as the kernel counts it; None leaves it
    unbounded, as for a case whose memory is on a device.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_child_main,
        args=(sender, os.getpid(), memory_limit_bytes, function, argument),
        daemon=True,
    )
    with deaf_to_interrupts():
        process.start()
    sender.close()
    deadline = time.monotonic() + timeout_s
    try:
        while receiver.poll(max(0.0, deadline - time.monotonic())):
            kind, *content = receiver.recv()
            if kind == "progress":
                on_progress(*content)
                continue
            outcome, result, reason = content
            return IsolatedRun(outcome=outcome, result=result, reason=reason)
        return IsolatedRun(outcome="timeout", reason=f"timed out after {timeout_s:.0f} s")
    except EOFError:
        process.join()
        return _died(process.exitcode, memory_limit_bytes)
    finally:
        receiver.close()
        process.kill()
        process.join()


def _died(exit_code: int | None, memory_limit_bytes: int | None) -> IsolatedRun[Any]:
    if exit_code == -signal.SIGKILL:
        return IsolatedRun(
            outcome="out_of_memory", reason="killed by the kernel, as it does when memory runs out"
        )
    limit = (
        ""
        if memory_limit_bytes is None
        else f", memory limit {format_binary_bytes(memory_limit_bytes)}"
    )
    return IsolatedRun(
        outcome="failed", reason=f"the process ended without a result: exit code {exit_code}{limit}"
    )


def _child_main(
    connection: Connection,
    parent_pid: int,
    memory_limit_bytes: int | None,
    function: Callable[[Any, Callable[[int, int], None]], Any],
    argument: Any,
) -> None:
    die_with_parent(parent_pid)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if memory_limit_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = (
            memory_limit_bytes if hard == resource.RLIM_INFINITY else min(memory_limit_bytes, hard)
        )
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

    def report_progress(completed: int, total: int) -> None:
        connection.send(("progress", completed, total))

    message: tuple[str, Any, str | None]
    try:
        message = ("ok", function(argument, report_progress), None)
    except BaseException as error:
        message = _failure(error)
    sys.stdout.flush()  # Whoever has the result may end this process at once.
    connection.send(("end", *message))
    connection.close()


def _failure(error: BaseException) -> tuple[str, None, str]:
    first_line = str(error).partition("\n")[0]
    if is_out_of_memory(error):
        return "out_of_memory", None, first_line or type(error).__name__
    traceback.print_exception(error, file=sys.stderr)
    return "failed", None, f"{type(error).__name__}: {first_line}"
