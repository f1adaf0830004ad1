"""Attention over random inputs: both passes, memory saved for backward, and the peak."""

import torch
from torch import Tensor

from paceline.benchmarks.attention.config import AttentionCase
from paceline.benchmarks.harness.devices import TORCH_DTYPES
from paceline.benchmarks.harness.measure import Stopwatch
from paceline.benchmarks.harness.memory import step_peaks, storage_bytes
from paceline.kernels import attention


class AttentionRun:
    """Random inputs with one head per sequence, and the attention operation over them."""

    def __init__(self, case: AttentionCase, device: torch.device) -> None:
        self.device = device
        self.causal = case.causal
        self.implementation = case.implementation
        self.operation = torch.compile(attention) if case.compiled else attention
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
