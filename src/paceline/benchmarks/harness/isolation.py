"""Turns cases into records: skips what cannot run or fit, and runs the rest in isolation.

Each case runs in a separate process, with a memory limit and a time limit. Linux answers memory
exhaustion with SIGKILL: a case that runs out of memory must not kill the sweep. In a fresh process,
no case inherits another's caches, compiled code or peak memory. The child's stdout is redirected to
its stderr, so that only records reach the parent's stdout.
"""

import dataclasses
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, Generic, Literal, TypeVar

import torch

from paceline.benchmarks.harness.measure import measured, resolve_device
from paceline.benchmarks.options import RunLimits
from paceline.core.errors import is_out_of_memory
from paceline.core.hardware import DeviceName
from paceline.core.processes import die_with_parent, ignore_sigint
from paceline.core.units import GIB, Progress, format_binary_bytes
from paceline.devices.hardware import HardwareLocation, describe_hardware, usable_memory_bytes
from paceline.records import CaseValue, Metric, Record
from paceline.records.schema import Outcome

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class IsolatedRun(Generic[Result]):
    """The outcome of a case: its result, or the reason why there is none."""

    outcome: Literal["ok", "out_of_memory", "failed", "timeout"]
    result: Result | None = None
    reason: str | None = None


def run_isolated(
    function: Callable[[Any, Progress], Result],
    argument: Any,
    *,
    memory_limit_bytes: int | None,
    timeout_s: float,
    on_progress: Progress = lambda _completed, _total: None,
) -> IsolatedRun[Result]:
    """Runs ``function(argument, on_progress)`` in a child process.

    `memory_limit_bytes` limits the child's data segment, as the kernel counts it. None sets no
    limit, for a case whose memory is on a device.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_child_main,
        args=(sender, os.getpid(), memory_limit_bytes, function, argument),
        daemon=True,
    )
    with ignore_sigint():
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
    function: Callable[[Any, Progress], Any],
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
    sys.stdout.flush()  # The parent may kill this process once it has the result.
    connection.send(("end", *message))
    connection.close()


def _failure(error: BaseException) -> tuple[str, None, str]:
    first_line = str(error).partition("\n")[0]
    if is_out_of_memory(error):
        return "out_of_memory", None, first_line or type(error).__name__
    traceback.print_exception(error, file=sys.stderr)
    return "failed", None, f"{type(error).__name__}: {first_line}"


Case = TypeVar("Case")

# Time to start a process, to compile, and to finish the step that exceeds the limit.
_GRACE_S = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject(Generic[Case]):
    """The functions that a sweep needs for one kind of case."""

    kind: str
    measure: Callable[[Case, Progress], Mapping[str, Metric]]
    case_fields: Callable[[Case, HardwareLocation], dict[str, CaseValue]]
    minimum_bytes: Callable[[Case], int]
    obstacle: Callable[[Case, torch.device], str | None] = lambda _case, _device: None
    """Returns why a case of any size cannot run on a device; by default None: every case can."""


def isolated_records(
    subject: Subject[Case],
    cases: Iterable[Case],
    device_name: DeviceName,
    limits: RunLimits,
    on_progress: Progress,
) -> Iterator[Record]:
    """Measures every case; a failure becomes a record and does not end the sweep."""
    for case in cases:
        device = resolve_device(device_name)
        usable = usable_memory_bytes(device)
        if limits.memory_limit_gib is not None:
            usable = int(limits.memory_limit_gib * GIB)
        metrics: Mapping[str, Metric] = {}
        outcome: Outcome = "skipped"
        reason = subject.obstacle(case, device)
        needed = subject.minimum_bytes(case)
        if reason is None and usable is not None and needed > usable:
            reason = (
                f"needs at least {format_binary_bytes(needed)}, but only "
                f"{format_binary_bytes(usable)} may be used"
            )
        if reason is None:
            run = run_isolated(
                subject.measure,
                case,
                memory_limit_bytes=usable if device.type == "cpu" else None,
                timeout_s=limits.time_limit_s * 2 + _GRACE_S,
                on_progress=on_progress,
            )
            metrics, outcome, reason = run.result or {}, run.outcome, run.reason
        fields = subject.case_fields(case, describe_hardware(device))
        yield measured(subject.kind, fields, metrics, outcome=outcome, reason=reason)
