"""Profiles one model's training step: time by operator, memory by category.

Phases: the step is warmed up; some steps are traced for time; then one more is traced for memory,
separately, because tracing every Python line makes it several times slower.
"""

import pathlib
import tempfile
from collections.abc import Mapping, Sequence

import torch

from paceline.accounting.counts import count_parameters, flops_per_token
from paceline.accounting.memory.step import minimum_step_bytes
from paceline.benchmarks.config import StepCase, StepSweep
from paceline.benchmarks.harness.measure import (
    current_environment,
    measured,
    predicted,
    resolve_device,
    storage_bytes,
)
from paceline.benchmarks.step import TimedStep, step_case_fields
from paceline.core.errors import UsageError
from paceline.core.ranges import BACKWARD, FORWARD, OPTIMIZER, STEP, short_name
from paceline.core.specs import bytes_per_element, precision_preset
from paceline.core.units import Progress, format_binary_bytes
from paceline.devices.hardware import describe_hardware, usable_memory_bytes
from paceline.devices.named_range import named_range
from paceline.records import CaseValue, Record
from paceline.traces.analysis import (
    ALL_OPERATORS,
    analyse_trace,
    operator_records,
    step_records,
    step_subject,
)
from paceline.traces.capture import profiling, record_memory
from paceline.traces.catalog import OpClass
from paceline.traces.memory import Category, MemoryTimeline, memory_timeline, read_allocations


def profile_step(sweep: StepSweep, trace: pathlib.Path, on_progress: Progress) -> list[Record]:
    """Traces a step and returns records of its operators' times and its memory by category."""
    cases = list(sweep.cases())
    if len(cases) != 1:
        raise UsageError("a trace shows one case; give one value to every flag that takes a list")
    (case,) = cases
    device = resolve_device(case.sweep.device)
    _require_memory(case, device)
    step = TimedStep(case, device)
    total = case.warmup + case.sweep.steps + 1
    for completed in range(case.warmup):
        step.run()
        on_progress(completed + 1, total)
    with profiling(trace, device, shapes=True):
        for completed in range(case.sweep.steps):
            with named_range(STEP):
                step.run()
            on_progress(case.warmup + completed + 1, total)
    analysis = analyse_trace(trace)
    timeline = trace_memory(step, trace.with_name("memory-snapshot.pickle"))
    on_progress(total, total)
    environment = current_environment()
    fields = step_case_fields(case, describe_hardware(device))
    subject = step_subject(fields)
    return [
        *step_records(analysis, subject, environment),
        *operator_records(analysis, subject, environment),
        *_flops_predictions(case, subject),
        *_memory_records(case, fields, timeline),
        *_allocation_records(subject, timeline),
    ]


def _require_memory(case: StepCase, device: torch.device) -> None:
    """Raises if even the lower bound of a step's memory does not fit."""
    precision = precision_preset(case.precision)
    needed = minimum_step_bytes(case.shape, case.batch, precision, case.phase)
    usable = usable_memory_bytes(device)
    if usable is not None and needed > usable:
        raise UsageError(
            f"--model {case.model} needs at least {format_binary_bytes(needed)}, but only "
            f"{format_binary_bytes(usable)} may be used; use a smaller model or batch"
        )


def trace_memory(step: TimedStep, snapshot: pathlib.Path) -> MemoryTimeline:
    """Runs one more step and returns its memory by category; call it after at least one step.

    On a GPU, a snapshot of its memory is written for torch's viewer.
    """
    step.optimizer.zero_grad(set_to_none=True)
    resident = {
        Category.PARAMETERS: storage_bytes(step.parameters()),
        Category.OPTIMIZER_STATE: storage_bytes(step.optimizer_state()),
        Category.OTHER: storage_bytes([*step.model.buffers(), step.inputs, step.targets]),
    }
    gradient_addresses: set[int] = set()
    with tempfile.TemporaryDirectory(prefix="paceline-trace-") as directory:
        path = pathlib.Path(directory) / "memory.json"
        with record_memory(path, step.device, snapshot):
            loss = step.forward()
            if step.phase != "forward":
                step.backward(loss)
                gradient_addresses = {
                    gradient.untyped_storage().data_ptr() for gradient in step.gradients()
                }
            del loss
            if step.phase == "train":
                step.optimizer_step()
        trace = read_allocations(path, on_device=step.device.type != "cpu")
    return memory_timeline(trace, resident=resident, gradient_addresses=gradient_addresses)


def _flops_predictions(case: StepCase, subject: str) -> list[Record]:
    """Returns predictions of the matmul FLOPs of each phase, by the formula."""
    flops = flops_per_token(case.shape, case.batch.context_length)
    expected = {FORWARD: flops.forward}
    if case.phase != "forward":
        expected[BACKWARD] = flops.backward
    fields = {"subject": subject, "work": OpClass.MATMUL, "operator": ALL_OPERATORS}
    return [
        predicted(
            "operator",
            {**fields, "range": short_name(name)},
            {"flops": per_token * case.batch.tokens_per_pass},
        )
        for name, per_token in expected.items()
    ]


def _memory_records(
    case: StepCase, fields: Mapping[str, CaseValue], timeline: MemoryTimeline
) -> list[Record]:
    """Returns the memory over the step, and predictions of its resident parts."""
    numbers: dict[str, float | Sequence[float]] = {
        "peak_bytes": timeline.peak_bytes,
        "time_s": timeline.times_s,
    }
    for category, values in timeline.num_bytes.items():
        numbers[f"{category}_bytes"] = values
        numbers[f"{category}_at_peak_bytes"] = timeline.peak_by_category[category]
    for name, (_start, end) in timeline.phases_s.items():
        if name in (FORWARD, BACKWARD, OPTIMIZER):
            numbers[f"{short_name(name)}_end_s"] = end
    precision = precision_preset(case.precision)
    num_parameters = count_parameters(case.shape).total
    moments = 2 * bytes_per_element(precision.optimizer_state) if case.phase == "train" else 0
    expected = {
        "parameters_at_peak_bytes": num_parameters * bytes_per_element(precision.parameters),
        "optimizer_state_at_peak_bytes": num_parameters * moments,
        "peak_bytes": minimum_step_bytes(case.shape, case.batch, precision, case.phase),
    }
    return [
        measured("memory_timeline", fields, numbers),
        predicted("memory_timeline", fields, expected),
    ]


def _allocation_records(subject: str, timeline: MemoryTimeline) -> list[Record]:
    return [
        measured(
            "allocation",
            {
                "subject": subject,
                "number": number,
                "category": group.category,
                "operator": group.operator,
                "place": group.place,
            },
            {"size_bytes": group.num_bytes, "num_allocations": group.count},
        )
        for number, group in enumerate(timeline.largest, start=1)
    ]
