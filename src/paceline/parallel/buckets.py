"""Gradients in few, flat, contiguous pieces.

The plan is a pure function of the parameters and the cap, so every rank arrives at the same one,
on every run and after every restart. Parameters are taken in reverse order, because backward
reaches the last layers first. A bucket holds one dtype on one device; a parameter larger than the
cap has a bucket of its own. Of each dtype and device, the first and the last bucket are small, and
sizes grow by half from there up to the cap: at the beginning, so that communication starts early;
towards the end, so that each bucket has gone when the next is ready, and only the last, which can
start no sooner than backward ends, is left to wait for. With that growth each bucket has gone in
time where backward takes at least 1.5 times as long as communication.

A bucket's buffer holds its gradients and, behind them, one number per parameter: 1 where this rank
has a gradient for it. Summed over the ranks with everything else, they tell without a further
call whether any rank had one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.errors import PacelineError

EDGE_BYTES = 2**20
"""With so much, the first and the last bucket are full."""

_GROWTH = 1.5

_ALIGNMENT_BYTES = 16  # The widest load of a GPU thread.


class GradientError(PacelineError):
    """A gradient that cannot be synchronised, naming its parameter."""


class TensorSpec(NamedTuple):
    """What a plan needs to know of a tensor."""

    name: str
    num_elements: int
    """Real numbers: a complex one counts as two."""
    dtype: torch.dtype
    device: torch.device


class Slot(NamedTuple):
    """Where a tensor lies in its bucket."""

    tensor: int
    """Its place in the list that was planned."""
    offset: int
    num_elements: int

    def piece_of(self, buffer: Tensor) -> Tensor:
        """Returns the tensor's elements in a bucket's buffer, flat."""
        return buffer[self.offset : self.offset + self.num_elements]


class BucketPlan(NamedTuple):
    """One bucket: its tensors in the order in which backward reaches them."""

    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]
    num_elements: int
    """Of all tensors, with what aligns them."""

    def message_bytes(self, reduction_dtype: torch.dtype | None) -> int:
        """Returns what is communicated, in the buffer's dtype or another."""
        return (self.num_elements + len(self.slots)) * (reduction_dtype or self.dtype).itemsize


def plan_buckets(tensors: Sequence[TensorSpec], cap_bytes: float | None) -> list[BucketPlan]:
    """Divides tensors into buckets of at most `cap_bytes`, in the order of their launch.

    Without a cap there is one bucket per dtype and device; a cap of zero makes one per tensor.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index in range(len(tensors) - 1, -1, -1):
        _, _, dtype, device = tensors[index]
        kinds.setdefault((dtype, device), []).append(index)
    plans = [
        _place(tensors, indices, dtype, device)
        for (dtype, device), of_kind in kinds.items()
        for indices in _divide(tensors, of_kind, dtype.itemsize, cap_bytes)
    ]
    # A bucket is ready when backward has reached its last tensor.
    plans.sort(key=lambda plan: -plan.slots[-1].tensor)
    return plans


def _divide(
    tensors: Sequence[TensorSpec], indices: list[int], itemsize: int, cap_bytes: float | None
) -> list[list[int]]:
    if cap_bytes is None:
        return [indices]
    sizes = [_aligned(tensors[index].num_elements, itemsize) * itemsize for index in indices]
    tail_lengths = _fill_groups(sizes[::-1], cap_bytes, stop_at_cap=True)
    head_lengths = _fill_groups(sizes[: len(sizes) - sum(tail_lengths)], cap_bytes)
    groups = []
    start = 0
    for length in (*head_lengths, *reversed(tail_lengths)):
        groups.append(indices[start : start + length])
        start += length
    return groups


def _fill_groups(sizes: Sequence[int], cap_bytes: float, *, stop_at_cap: bool = False) -> list[int]:
    """Returns the lengths of groups that are full with half as much again as the one before.

    None holds more than the cap, unless it holds a single tensor. With `stop_at_cap`, what would
    come after the groups that are smaller than the cap is left.
    """
    lengths: list[int] = []
    enough = min(EDGE_BYTES, cap_bytes)
    length = num_bytes = 0
    for index, size in enumerate(sizes):
        length += 1
        num_bytes += size
        next_size = sizes[index + 1] if index + 1 < len(sizes) else 0
        if num_bytes >= enough or num_bytes + next_size > cap_bytes:
            lengths.append(length)
            length = num_bytes = 0
            enough = min(_GROWTH * enough, cap_bytes)
            if stop_at_cap and enough == cap_bytes:
                return lengths
    return [*lengths, length] if length else lengths


def _place(
    tensors: Sequence[TensorSpec], indices: list[int], dtype: torch.dtype, device: torch.device
) -> BucketPlan:
    offset = 0
    slots = []
    for index in indices:
        num_elements = tensors[index].num_elements
        slots.append(Slot(index, offset, num_elements))
        offset += _aligned(num_elements, dtype.itemsize)
    return BucketPlan(dtype, device, tuple(slots), offset)


def _aligned(num_elements: int, itemsize: int) -> int:
    alignment = _ALIGNMENT_BYTES // itemsize
    return -(-num_elements // alignment) * alignment


def tensor_spec(name: str, tensor: Tensor) -> TensorSpec:
    """Describes a tensor for a plan."""
    dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    return TensorSpec(name, tensor.numel() * (1 + tensor.is_complex()), dtype, tensor.device)


class Bucket:
    """A flat buffer whose pieces are the gradients of its parameters."""

    def __init__(self, plan: BucketPlan, parameters: Sequence[nn.Parameter]) -> None:
        self.plan = plan
        self.parameters = [parameters[slot.tensor] for slot in plan.slots]
        self.dtypes = [parameter.dtype for parameter in self.parameters]
        self.buffer = torch.zeros(
            plan.num_elements + len(plan.slots), dtype=plan.dtype, device=plan.device
        )
        self.presence = self.buffer[plan.num_elements :]
        self._addresses = [
            self.buffer.data_ptr() + slot.offset * plan.dtype.itemsize for slot in plan.slots
        ]
        self.views = [
            view_like(parameter, slot.piece_of(self.buffer))
            for slot, parameter in zip(plan.slots, self.parameters, strict=True)
        ]

    def take(self, position: int, scale: float, name: str) -> bool:
        """Moves a gradient into the buffer, scaled on the way; False if it lay there already.

        Optimizers drop gradients after a step, and user code may set others: each comes back as
        a tensor of its own, and becomes a view of the buffer again here.
        """
        parameter, slot = self.parameters[position], self.plan.slots[position]
        gradient = parameter.grad
        if gradient is None:
            raise GradientError(
                f"the gradient of parameter {name!r} was cleared while backward ran; clear it after"
            )
        if gradient.layout != torch.strided:
            raise GradientError(
                f"parameter {name!r} has a {gradient.layout} gradient; only dense ones can be "
                "synchronised: make its layer with sparse=False"
            )
        expected = self.dtypes[position]
        if gradient.dtype != expected or gradient.device != self.plan.device:
            raise GradientError(
                f"parameter {name!r} was converted to {gradient.dtype} on {gradient.device} after "
                f"its container was made for {expected} on {self.plan.device}; convert it before"
            )
        if gradient.requires_grad:
            raise GradientError(
                f"the gradient of parameter {name!r} has a graph of its own: backward with "
                "create_graph=True cannot be averaged; use torch.autograd.grad for it"
            )
        # Not whether it is the same object: converting a module lets that point elsewhere.
        if gradient.data_ptr() == self._addresses[position]:
            return False
        if gradient is self.views[position]:
            self.views[position] = view_like(parameter, slot.piece_of(self.buffer))
        torch.mul(gradient, scale, out=self.views[position])
        parameter.grad = self.views[position]
        return True


def view_like(parameter: Tensor, piece: Tensor) -> Tensor:
    """Shapes a flat piece like a parameter, with the same strides where it is dense."""
    if parameter.is_complex():
        return torch.view_as_complex(piece.view(*parameter.shape, 2))
    if _is_dense(parameter):
        return piece.as_strided(parameter.shape, parameter.stride(), piece.storage_offset())
    return piece.view(parameter.shape)


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return tensor.numel() > 0
