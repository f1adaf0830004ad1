"""Attention on its own: time of both passes, and what is kept between them."""

import torch
from torch import Tensor

from paceline.benchmarks.config import AttentionCase
from paceline.benchmarks.devices import TORCH_DTYPES, Place, resolve_device
from paceline.benchmarks.measure import Progress, Stopwatch, sample
from paceline.benchmarks.memory import resident_peak_bytes, step_peaks
from paceline.kernels import attention_reference
from paceline.records.schema import CaseValue, Metric


class AttentionRun:
    """Random inputs and the operation over them."""

    def __init__(self, case: AttentionCase, device: torch.device) -> None:
        self.device = device
        self.causal = case.causal
        self.operation = (
            torch.compile(attention_reference) if case.compiled else attention_reference
        )
        torch.manual_seed(0)
        size = (case.batch.num_sequences, case.batch.context_length, case.head_dim)
        dtype = TORCH_DTYPES[case.dtype]
        self.inputs = [
            torch.randn(size, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
        ]
        self.output_gradient = torch.randn(size, device=device, dtype=dtype)

    def forward(self) -> Tensor:
        """Computes attention with gradients recorded."""
        query, key, value = self.inputs
        return self.operation(query, key, value, causal=self.causal)

    def clear_gradients(self) -> None:
        """Drops the gradients, so that backward allocates them as a training step would."""
        for tensor in self.inputs:
            tensor.grad = None

    def run(self) -> dict[str, float]:
        """Runs both passes and returns their seconds."""
        self.clear_gradients()
        watch = Stopwatch(self.device)
        output = self.forward()
        forward_time_s = watch.lap()
        torch.autograd.backward(output, self.output_gradient)
        return {"forward_time_s": forward_time_s, "backward_time_s": watch.lap()}

    def saved_bytes(self) -> int:
        """Returns the bytes that autograd keeps from forward to backward, inputs included."""
        saved: dict[int, int] = {}
        # The tensors are held until all are counted: a freed one's address would be used again.
        held: list[Tensor] = []

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            self.forward()
        return sum(saved.values())

    def peak_bytes(self) -> int:
        """Returns the peak of one forward and backward pass."""
        self.clear_gradients()
        peaks = step_peaks(
            self.device,
            resident_tensors=[*self.inputs, self.output_gradient],
            phases={"both": lambda: torch.autograd.backward(self.forward(), self.output_gradient)},
        )
        return peaks["both"]


def measure_attention(case: AttentionCase, on_progress: Progress) -> dict[str, Metric]:
    """Measures one case in this process and returns its metrics."""
    run = AttentionRun(case, resolve_device(case.device))
    metrics = {"saved_for_backward_bytes": Metric(value=run.saved_bytes())}
    samples = sample(
        run.run,
        warmup=case.warmup,
        steps=case.steps,
        time_limit_s=case.time_limit_s,
        on_progress=on_progress,
    )
    metrics |= {name: Metric.from_samples(values) for name, values in samples.items()}
    metrics["peak_bytes"] = Metric(value=run.peak_bytes())
    metrics["resident_peak_bytes"] = Metric(value=resident_peak_bytes())
    return metrics


def attention_case_fields(case: AttentionCase, place: Place) -> dict[str, CaseValue]:
    """Returns the case of the record."""
    return {
        "implementation": "naive",
        "batch": case.batch.num_sequences,
        "context": case.batch.context_length,
        "head_dim": case.head_dim,
        "causal": case.causal,
        "dtype": case.dtype,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "compile": "whole" if case.compiled else "none",
        **place.as_case(),
        "warmup": case.warmup,
        "steps": case.steps,
    }
