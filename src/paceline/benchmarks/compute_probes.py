"""The parts of a training step that compute, each ready to be timed on its own.

They use memory as a step does: weights and inputs are taken in turn from several, so that none is
still in a cache from the time before, and results are kept for a while, as activations are.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.benchmarks.calibrate_config import AttentionShape, ComputeShapes, LinearShape
from paceline.benchmarks.measure import Stopwatch
from paceline.core.units import MIB
from paceline.kernels.attention import attention

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

    def run(self) -> dict[str, float]:
        """Runs it once and returns seconds, or seconds per unit, by name."""


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

    def run(self) -> dict[str, float]:
        """Times one layer of a step."""
        weight, x, gradient = next(self._next)
        watch = Stopwatch(self._device)
        F.linear(x, weight)
        forward_s = watch.lap()
        weight, x, gradient = next(self._next)
        watch = Stopwatch(self._device)
        torch.mm(gradient, weight)
        torch.mm(gradient.t(), x)
        return {"forward_time_s": forward_s, "backward_time_s": watch.lap()}


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

    def run(self) -> dict[str, float]:
        """Times one layer's attention."""
        watch = Stopwatch(self._device)
        query, key, value = self._inputs
        mixed = attention(query, key, value, causal=True, implementation="auto")
        forward_s = watch.lap()
        torch.autograd.grad(mixed, self._inputs, self._gradient)
        return {"forward_time_s": forward_s, "backward_time_s": watch.lap()}


class StreamProbe:
    """Elementwise operations whose results are kept, as activations are."""

    name = "stream"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inputs = torch.randn(4, _STREAM_ELEMENTS, device=device)

    def run(self) -> dict[str, float]:
        """Times sums of two tensors: three passes over the elements each."""
        rows = self._inputs.unbind()
        kept = []
        watch = Stopwatch(self._device)
        for index in range(_STREAM_RESULTS):
            kept.append(rows[index % 4] + rows[(index + 1) % 4])
        return {"element_time_s": watch.lap() / (3 * _STREAM_RESULTS * _STREAM_ELEMENTS)}


class CopyProbe:
    """A copy of one large stretch of memory to another."""

    name = "copy"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._source = torch.randn(_COPY_ELEMENTS, device=device)
        self._target = torch.empty_like(self._source)

    def run(self) -> dict[str, float]:
        """Times a copy: two passes over the elements."""
        watch = Stopwatch(self._device)
        self._target.copy_(self._source)
        return {"element_time_s": watch.lap() / (2 * _COPY_ELEMENTS)}


class CallProbe:
    """Operators on next to nothing, recorded for backward."""

    name = "call"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._input = torch.zeros(1, device=device, requires_grad=True)

    def run(self) -> dict[str, float]:
        """Times a chain of operators, forward and backward, per operator."""
        watch = Stopwatch(self._device)
        x = self._input
        for _ in range(_CALLS):
            x = x + self._input
        forward_s = watch.lap()
        torch.autograd.grad(x, self._input)
        return {"forward_time_s": forward_s / _CALLS, "backward_time_s": watch.lap() / _CALLS}


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

    def run(self) -> dict[str, float]:
        """Times a step, per parameter that it updates."""
        watch = Stopwatch(self._device)
        self._optimizer.step()
        return {"element_time_s": watch.lap() / (_OPTIMIZER_TENSORS * _OPTIMIZER_ELEMENTS)}


def make_probes(shapes: ComputeShapes, device: torch.device) -> Sequence[Probe]:
    """Returns a probe of every shape, and those that no shape makes a difference to."""
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


def _several(rows: int, columns: int, device: torch.device) -> list[Tensor]:
    """Returns equal matrices to take in turn."""
    first = torch.randn(rows, columns, device=device)
    num_copies = min(_MOST_COPIES, 2 + _WEIGHTS_BYTES // first.nbytes)
    return [first, *(first.clone() for _ in range(num_copies - 1))]
