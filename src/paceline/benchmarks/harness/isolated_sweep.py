"""Turns cases into records: skips what cannot run or fit, and runs the rest in isolation."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

import torch

from paceline.benchmarks.harness.config import RunLimits, TimedCase
from paceline.benchmarks.harness.devices import resolve_device
from paceline.benchmarks.harness.isolation import run_isolated
from paceline.benchmarks.harness.measure import Progress
from paceline.benchmarks.harness.records import measured
from paceline.core.units import GIB, format_binary_bytes
from paceline.parallel.ranks.hardware import (
    HardwareLocation,
    describe_hardware,
    usable_memory_bytes,
)
from paceline.records import CaseValue, Metric, Record
from paceline.records.schema import Outcome

Case = TypeVar("Case", bound=TimedCase)

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
    subject: Subject[Case], cases: Iterable[Case], limits: RunLimits, on_progress: Progress
) -> Iterator[Record]:
    """Measures every case; a failure becomes a record and does not end the sweep."""
    for case in cases:
        device = resolve_device(case.device)
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
                timeout_s=case.time_limit_s * 2 + _GRACE_S,
                on_progress=on_progress,
            )
            metrics, outcome, reason = run.result or {}, run.outcome, run.reason
        fields = subject.case_fields(case, describe_hardware(device))
        yield measured(subject.kind, fields, metrics, outcome=outcome, reason=reason)
