"""From cases to records: what cannot run or fit is skipped, the rest runs in isolation."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

import torch

from paceline.accounting import minimum_attention_bytes, minimum_step_bytes
from paceline.benchmarks.attention import (
    attention_case_fields,
    attention_obstacle,
    measure_attention,
)
from paceline.benchmarks.attention_config import AttentionCase, AttentionSweep
from paceline.benchmarks.config import RunLimits, StepCase, StepSweep
from paceline.benchmarks.devices import (
    Place,
    current_environment,
    describe_place,
    resolve_device,
)
from paceline.benchmarks.isolation import run_isolated
from paceline.benchmarks.measure import Progress
from paceline.benchmarks.memory import usable_memory_bytes
from paceline.benchmarks.step import measure_step, step_case_fields
from paceline.core.specs import bytes_per_element, precision_preset
from paceline.core.units import GIB, format_binary_bytes
from paceline.records import CaseValue, Metric, Record
from paceline.records.schema import Outcome

Case = TypeVar("Case", StepCase, AttentionCase)

# Starting a process, compiling, and the one step that is over the limit when it is noticed.
_GRACE_S = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject(Generic[Case]):
    """What a sweep needs to know of the kind of case it runs."""

    kind: str
    measure: Callable[[Case, Progress], Mapping[str, Metric]]
    case_fields: Callable[[Case, Place], dict[str, CaseValue]]
    minimum_bytes: Callable[[Case], int]
    obstacle: Callable[[Case, torch.device], str | None] = lambda _case, _device: None
    """Why a case cannot run on a device, whatever its size; by default nothing is in the way."""


def step_records(sweep: StepSweep, on_progress: Progress) -> Iterator[Record]:
    """Measures every case of the sweep; a failure is a record, not the end."""
    subject = Subject(
        kind="step",
        measure=measure_step,
        case_fields=step_case_fields,
        minimum_bytes=lambda case: minimum_step_bytes(
            case.shape, case.batch, precision_preset(case.precision), case.phase
        ),
    )
    for case in sweep.cases():
        yield _record(subject, case, sweep.limits, on_progress)


def attention_records(sweep: AttentionSweep, on_progress: Progress) -> Iterator[Record]:
    """Measures every case of the sweep; a failure is a record, not the end."""
    subject = Subject(
        kind="attention",
        measure=measure_attention,
        case_fields=attention_case_fields,
        minimum_bytes=lambda case: minimum_attention_bytes(
            case.implementation,
            case.batch,
            case.head_dim,
            bytes_per_element(case.dtype),
            compiled=case.compiled,
        ),
        obstacle=attention_obstacle,
    )
    for case in sweep.cases():
        yield _record(subject, case, sweep.limits, on_progress)


def _record(subject: Subject[Case], case: Case, limits: RunLimits, on_progress: Progress) -> Record:
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
            f"needs at least {format_binary_bytes(needed)}, "
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
    return Record(
        kind=subject.kind,
        case=subject.case_fields(case, describe_place(device)),
        environment=current_environment(),
        metrics=dict(metrics),
        outcome=outcome,
        reason=reason,
    )
