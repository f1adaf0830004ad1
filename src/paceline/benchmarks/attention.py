"""Benchmark of attention by itself: time and rate of both passes, and memory saved for backward.

Passes are timed by stopwatch, or on CUDA by Triton's do_bench. A pass on a GPU may take less time
than launching it, and the next one finds its inputs in the cache. do_bench times on the device and
clears its cache in between, so the figures are comparable with published kernel benchmarks. It
measures for a duration rather than a number of calls: a first call by stopwatch estimates the
duration of the case's calls.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal

import torch
import torch._functorch.config
from torch import Tensor

from paceline.accounting.attention import attention_flops, minimum_attention_bytes
from paceline.benchmarks.config import AttentionCase, AttentionSweep
from paceline.benchmarks.harness.isolation import Subject, isolated_records
from paceline.benchmarks.harness.measure import (
    TORCH_DTYPES,
    Stopwatch,
    resolve_device,
    sample,
    step_peaks,
    storage_bytes,
)
from paceline.core.hardware import CUDA
from paceline.core.host import resident_peak_bytes
from paceline.core.specs import bytes_per_element
from paceline.core.units import Progress
from paceline.devices.hardware import HardwareLocation
from paceline.kernels import attention
from paceline.records import Record
from paceline.records.schema import CaseValue, Metric


class AttentionRun:
    """Random inputs with one head per sequence, and the attention operation over them."""

    def __init__(self, case: AttentionCase, device: torch.device) -> None:
        self.device = device
        self.causal = case.sweep.causal
        self.implementation = case.implementation
        self.operation = torch.compile(attention) if case.sweep.compile else attention
        torch.manual_seed(0)
        size = (case.batch.num_sequences, 1, case.batch.context_length, case.head_dim)
        dtype = TORCH_DTYPES[case.dtype]
        self.inputs = [
            torch.randn(size, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
        ]
        self.output_gradient = torch.randn(size, device=device, dtype=dtype)

    def forward(self) -> Tensor:
        """Computes attention with gradients recorded."""
        query, key, value = self.inputs
        return self.operation(
            query, key, value, causal=self.causal, implementation=self.implementation
        )

    def backward(self, output: Tensor, *, keep_graph: bool = False) -> None:
        """Computes the gradients of the inputs."""
        torch.autograd.backward(output, self.output_gradient, retain_graph=keep_graph)

    def both(self) -> None:
        """Runs forward, then backward."""
        self.backward(self.forward())

    def clear_gradients(self) -> None:
        """Drops the gradients, so that backward allocates them as a training step would."""
        for tensor in self.inputs:
            tensor.grad = None

    def run(self) -> dict[str, float]:
        """Runs both passes and returns the seconds of each, and of both."""
        self.clear_gradients()
        watch = Stopwatch(self.device)
        output = self.forward()
        forward_time_s = watch.lap()
        self.backward(output)
        backward_time_s = watch.lap()
        return {
            "forward_time_s": forward_time_s,
            "backward_time_s": backward_time_s,
            "both_time_s": forward_time_s + backward_time_s,
        }

    def saved_bytes(self) -> int:
        """Returns the bytes that autograd saves for backward, inputs included."""
        # Hold them until all are counted: the address of a freed one could be reused.
        held: list[Tensor] = []

        def hold(tensor: Tensor) -> Tensor:
            held.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            self.forward()
        return storage_bytes(held)

    def peak_bytes(self) -> int:
        """Returns the peak of one forward and backward pass."""
        self.clear_gradients()
        peaks = step_peaks(
            self.device,
            resident_tensors=[*self.inputs, self.output_gradient],
            phases={"both": self.both},
        )
        return peaks["both"]


_NUM_MEASUREMENTS = 3


def timer_for(device_type: str) -> Literal["stopwatch", "do_bench"]:
    """Returns the timer for a type of device."""
    return "do_bench" if device_type == CUDA else "stopwatch"


def time_passes(
    run: AttentionRun, case: AttentionCase, on_progress: Progress
) -> dict[str, list[float]]:
    """Returns the seconds of forward, of backward and of both."""
    if timer_for(run.device.type) == "do_bench":
        return do_bench_samples(run, case, on_progress)
    sweep = case.sweep
    return sample(
        run.run,
        warmup=sweep.warmup,
        steps=sweep.steps,
        time_limit_s=sweep.limits.time_limit_s,
        on_progress=on_progress,
    )


def do_bench_samples(
    run: AttentionRun, case: AttentionCase, on_progress: Progress
) -> dict[str, list[float]]:
    """Times each pass separately, and both together, with a third of the time limit each."""
    samples: dict[str, list[float]] = {}

    def measure(name: str, function: Callable[[], object]) -> None:
        samples[name] = _do_bench(function, run, case.sweep, seconds_each=laps[name])
        on_progress(len(samples), _NUM_MEASUREMENTS)

    with _graphs_that_can_be_kept(run, compiled=case.sweep.compile):
        run.run()
        laps = run.run()
        measure("forward_time_s", run.forward)
        measure("both_time_s", run.both)
        # Last, so that the tensors kept for this one take no memory from the other measurements.
        output = run.forward()
        measure("backward_time_s", lambda: run.backward(output, keep_graph=True))
    return samples


def _do_bench(
    function: Callable[[], object], run: AttentionRun, sweep: AttentionSweep, *, seconds_each: float
) -> list[float]:
    from triton.testing import do_bench

    limit_s = sweep.limits.time_limit_s / _NUM_MEASUREMENTS
    warmup_s = min(sweep.warmup * seconds_each, limit_s / 2)
    measuring_s = min(sweep.steps * seconds_each, limit_s - warmup_s)
    milliseconds = do_bench(
        function,
        warmup=warmup_s * 1e3,
        rep=measuring_s * 1e3,
        grad_to_none=run.inputs,
        return_mode="all",
    )
    return [value / 1e3 for value in milliseconds]


@contextlib.contextmanager
def _graphs_that_can_be_kept(run: AttentionRun, *, compiled: bool) -> Iterator[None]:
    """Lets a compiled backward run repeatedly on the tensors that forward saved.

    By default it overwrites some of them, and torch refuses to do that while keeping the graph.
    Later measurements, such as memory, use an operation that is compiled as usual again.
    """
    if not compiled:
        yield
        return
    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=False):
        yield
    torch._dynamo.reset()
    run.run()


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
            compiled=sweep.compile,
        ),
        obstacle=attention_obstacle,
    )
    return isolated_records(subject, sweep.cases(), sweep.device, sweep.limits, on_progress)


def attention_obstacle(case: AttentionCase, device: torch.device) -> str | None:
    """Returns why a case cannot be measured on a device, or None if it can."""
    if case.implementation == "triton" and device.type != CUDA:
        return f"the Triton kernels need a CUDA device, this is {device.type!r}"
    return None


def measure_attention(case: AttentionCase, on_progress: Progress) -> dict[str, Metric]:
    """Measures one case in this process and returns its metrics."""
    run = AttentionRun(case, resolve_device(case.sweep.device))
    metrics = {"saved_for_backward_bytes": Metric(value=run.saved_bytes())}
    samples = time_passes(run, case, on_progress)
    metrics |= {name: Metric.from_samples(values) for name, values in samples.items()}
    flops = attention_flops(case.batch, case.head_dim, causal=case.sweep.causal)
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
        "causal": case.sweep.causal,
        "dtype": case.dtype,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "compile": "whole" if case.sweep.compile else "none",
        **location.as_case(),
        "warmup": case.sweep.warmup,
        "steps": case.sweep.steps,
        "timer": timer_for(location.device),
    }
