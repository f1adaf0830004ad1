"""Benchmark of attention by itself: time and rate of both passes, and memory saved for backward."""

from collections.abc import Iterator

import torch

from paceline.accounting import minimum_attention_bytes
from paceline.accounting.attention.cost import attention_flops
from paceline.benchmarks.attention.config import AttentionCase, AttentionSweep
from paceline.benchmarks.attention.run import AttentionRun
from paceline.benchmarks.attention.timer import time_passes, timer_for
from paceline.benchmarks.harness.devices import resolve_device
from paceline.benchmarks.harness.isolated_sweep import Subject, isolated_records
from paceline.benchmarks.harness.measure import Progress
from paceline.core.host_memory import resident_peak_bytes
from paceline.core.specs import bytes_per_element
from paceline.parallel.ranks.hardware import HardwareLocation
from paceline.records import Record
from paceline.records.schema import CaseValue, Metric


def attention_records(sweep: AttentionSweep, on_progress: Progress) -> Iterator[Record]:
    """Measures every case of the sweep."""
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
    return isolated_records(subject, sweep.cases(), sweep.limits, on_progress)


def attention_obstacle(case: AttentionCase, device: torch.device) -> str | None:
    """Returns why a case cannot be measured on a device, or None if it can."""
    if case.implementation == "triton" and device.type != "cuda":
        return f"the Triton kernels need a CUDA device, this is {device.type!r}"
    return None


def measure_attention(case: AttentionCase, on_progress: Progress) -> dict[str, Metric]:
    """Measures one case in this process and returns its metrics."""
    run = AttentionRun(case, resolve_device(case.device))
    metrics = {"saved_for_backward_bytes": Metric(value=run.saved_bytes())}
    samples = time_passes(run, case, on_progress)
    metrics |= {name: Metric.from_samples(values) for name, values in samples.items()}
    flops = attention_flops(case.batch, case.head_dim, causal=case.causal)
    metrics["flops_per_s"] = Metric(value=flops.total / metrics["both_time_s"].value)
    metrics["peak_bytes"] = Metric(value=run.peak_bytes())
    metrics["resident_peak_bytes"] = Metric(value=resident_peak_bytes())
    return metrics


def attention_case_fields(case: AttentionCase, location: HardwareLocation) -> dict[str, CaseValue]:
    """Returns the case fields of the record."""
    return {
        "implementation": case.implementation,
        "batch": case.batch.num_sequences,
        "context": case.batch.context_length,
        "head_dim": case.head_dim,
        "causal": case.causal,
        "dtype": case.dtype,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "compile": "whole" if case.compiled else "none",
        **location.as_case(),
        "warmup": case.warmup,
        "steps": case.steps,
        "timer": timer_for(location.device),
    }
