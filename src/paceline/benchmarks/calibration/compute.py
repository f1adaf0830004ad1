"""The parts of a training step that compute, each ready to be timed on its own.

They use memory as a step does: weights and inputs of linear layers are taken in turn from several,
so that none is still in a cache from the time before, and elementwise results are kept for a while,
as activations are. A run repeats its part before it waits for the device, so that a GPU's queue is
full as in training.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paceline.benchmarks.calibration.config import AttentionShape, ComputeShapes, LinearShape
from paceline.benchmarks.harness.measure import Stopwatch
from paceline.core.errors import UsageError
from paceline.core.units import MIB, format_binary_bytes
from paceline.kernels.attention.api import attention
from paceline.records.environment import physical_memory_bytes

# More than what a core keeps close.
_WEIGHTS_BYTES = 32 * MIB
_MOST_COPIES = 16
_STREAM_ELEMENTS = 2**18
_STREAM_RESULTS = 64
_COPY_ELEMENTS = 2**24
_CALLS = 300
_OPTIMIZER_TENSORS = 8
_OPTIMIZER_ELEMENTS = 2**20


class Probe(Protocol):
    """One part of a step."""

    name: str

    def run(self, repetitions: int) -> dict[str, float]:
        """Runs it repeatedly and returns the seconds of one time, or per unit, by name."""


class LinearProbe:
    """A linear layer: its output, then the gradients of its input and weight."""

    def __init__(self, shape: LinearShape, device: torch.device) -> None:
        self.name = f"linear {shape.tokens} x {shape.inputs} x {shape.outputs}"
        self._device = device
        weights = _several(shape.outputs, shape.inputs, device)
        inputs = _several(shape.tokens, shape.inputs, device)
        gradients = _several(shape.tokens, shape.outputs, device)
        self._next: Iterator[tuple[Tensor, Tensor, Tensor]] = zip(
            itertools.cycle(weights), itertools.cycle(inputs), itertools.cycle(gradients)
        )

    def run(self, repetitions: int) -> dict[str, float]:
        """Times the layers of a step, one after the other."""
        watch = Stopwatch(self._device)
        for _ in range(repetitions):
            weight, x, _gradient = next(self._next)
            F.linear(x, weight)
        forward_s = watch.lap()
        for _ in range(repetitions):
            weight, x, gradient = next(self._next)
            torch.mm(gradient, weight)
            torch.mm(gradient.t(), x)
        backward_s = watch.lap()
        return {
            "forward_time_s": forward_s / repetitions,
            "backward_time_s": backward_s / repetitions,
        }


class AttentionProbe:
    """Causal attention, forward and backward."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self.name = f"attention {shape}"
        self._device = device
        self._inputs = [
            torch.randn(
                shape.num_sequences,
                heads,
                shape.context,
                shape.head_dim,
                device=device,
                requires_grad=True,
            )
            for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        ]
        self._gradient = torch.randn_like(self._inputs[0])

    def run(self, repetitions: int) -> dict[str, float]:
        """Times the attention of as many layers."""
        query, key, value = self._inputs
        watch = Stopwatch(self._device)
        mixed = [
            attention(query, key, value, causal=True, implementation="auto")
            for _ in range(repetitions)
        ]
        forward_s = watch.lap()
        for layer in mixed:
            torch.autograd.grad(layer, self._inputs, self._gradient)
        backward_s = watch.lap()
        return {
            "forward_time_s": forward_s / repetitions,
            "backward_time_s": backward_s / repetitions,
        }


class StreamProbe:
    """Elementwise operations whose results are kept, as activations are."""

    name = "stream"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inputs = torch.randn(4, _STREAM_ELEMENTS, device=device)

    def run(self, repetitions: int) -> dict[str, float]:
        """Times sums of two tensors: three passes over the elements each."""
        rows = self._inputs.unbind()
        watch = Stopwatch(self._device)
        for _ in range(repetitions):
            kept = []
            for index in range(_STREAM_RESULTS):
                kept.append(rows[index % 4] + rows[(index + 1) % 4])
        num_elements = repetitions * _STREAM_RESULTS * _STREAM_ELEMENTS
        return {"element_time_s": watch.lap() / (3 * num_elements)}


class CopyProbe:
    """A copy of one large stretch of memory to another."""

    name = "copy"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._source = torch.randn(_COPY_ELEMENTS, device=device)
        self._target = torch.empty_like(self._source)

    def run(self, repetitions: int) -> dict[str, float]:
        """Times copies: two passes over the elements each."""
        watch = Stopwatch(self._device)
        for _ in range(repetitions):
            self._target.copy_(self._source)
        return {"element_time_s": watch.lap() / (2 * repetitions * _COPY_ELEMENTS)}


class CallProbe:
    """Operators on next to nothing, recorded for backward."""

    name = "call"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._input = torch.zeros(1, device=device, requires_grad=True)

    def run(self, repetitions: int) -> dict[str, float]:
        """Times a chain of operators, forward and backward, per operator."""
        num_calls = repetitions * _CALLS
        watch = Stopwatch(self._device)
        x = self._input
        for _ in range(num_calls):
            x = x + self._input
        forward_s = watch.lap()
        torch.autograd.grad(x, self._input)
        return {"forward_time_s": forward_s / num_calls, "backward_time_s": watch.lap() / num_calls}


class OptimizerProbe:
    """A step of fused AdamW."""

    name = "optimizer"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        parameters = [
            torch.zeros(_OPTIMIZER_ELEMENTS, device=device, requires_grad=True)
            for _ in range(_OPTIMIZER_TENSORS)
        ]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        self._optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
        self._optimizer.step()

    def run(self, repetitions: int) -> dict[str, float]:
        """Times steps, per parameter that they update."""
        watch = Stopwatch(self._device)
        for _ in range(repetitions):
            self._optimizer.step()
        num_elements = repetitions * _OPTIMIZER_TENSORS * _OPTIMIZER_ELEMENTS
        return {"element_time_s": watch.lap() / num_elements}


def make_probes(shapes: ComputeShapes, device: torch.device) -> Sequence[Probe]:
    """Returns a probe of every shape, and those that no shape makes a difference to."""
    _require_room(shapes)
    general: list[Callable[[torch.device], Probe]] = [
        StreamProbe,
        CopyProbe,
        CallProbe,
        OptimizerProbe,
    ]
    return [
        *(LinearProbe(shape, device) for shape in shapes.linears),
        *(AttentionProbe(shape, device) for shape in shapes.attentions),
        *(make(device) for make in general),
    ]


def _require_room(shapes: ComputeShapes) -> None:
    """Refuses shapes that would not fit into the machine's memory beside those of other ranks."""
    num_bytes = sum(
        2 * 4 * (linear.tokens * (linear.inputs + linear.outputs) + linear.inputs * linear.outputs)
        for linear in shapes.linears
    )
    memory_bytes = physical_memory_bytes()
    if memory_bytes is not None and num_bytes * dist.get_world_size() > memory_bytes / 2:
        raise UsageError(
            f"the linear layers to time take {format_binary_bytes(num_bytes)} per rank, more than "
            "half of this machine's memory; calibrate fewer or smaller models or batches"
        )


def _several(rows: int, columns: int, device: torch.device) -> list[Tensor]:
    """Returns equal matrices to take in turn."""
    first = torch.randn(rows, columns, device=device)
    num_copies = min(_MOST_COPIES, 2 + _WEIGHTS_BYTES // first.nbytes)
    return [first, *(first.clone() for _ in range(num_copies - 1))]
