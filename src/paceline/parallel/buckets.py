"""Gradients in few, flat, contiguous pieces.

The plan is a pure function of the parameters and the cap, so every rank arrives at the same one,
on every run and after every restart. Parameters are taken in reverse order, because backward
reaches the last layers first. A bucket holds one dtype on one device; how sizes grow up to the cap
and shrink again is `paceline.accounting.communication.buckets`'s.

A bucket's buffer holds its gradients and, behind them, one number per parameter: 1 where this rank
has a gradient for it. Summed over the ranks with everything else, they tell without a further
call whether any rank had one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.accounting.communication.buckets import aligned, divide_into_buckets
from paceline.core.errors import PacelineError


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
    """The tensor's place in the list that was planned."""
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
    """Elements of all tensors, padding included."""

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
    plans = []
    for (dtype, device), of_kind in kinds.items():
        itemsize = dtype.itemsize
        sizes = [aligned(tensors[index].num_elements, itemsize) * itemsize for index in of_kind]
        for indices in divide_into_buckets(of_kind, sizes, cap_bytes):
            plans.append(place_tensors(tensors, indices, dtype, device))
    # A bucket is ready when backward has reached its last tensor.
    plans.sort(key=lambda plan: -plan.slots[-1].tensor)
    return plans


def place_tensors(
    tensors: Sequence[TensorSpec], indices: Sequence[int], dtype: torch.dtype, device: torch.device
) -> BucketPlan:
    """Lays tensors one behind another, each aligned."""
    itemsize = dtype.itemsize
    offset = 0
    slots = []
    for index in indices:
        num_elements = tensors[index].num_elements
        slots.append(Slot(index, offset, num_elements))
        offset += aligned(num_elements, itemsize)
    return BucketPlan(dtype, device, tuple(slots), offset)


def tensor_spec(name: str, tensor: Tensor) -> TensorSpec:
    """Describes a tensor for a plan."""
    dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    return TensorSpec(name, num_reals(tensor), dtype, tensor.device)


def num_reals(tensor: Tensor) -> int:
    """Returns how many real numbers a tensor holds; a complex one is two."""
    return tensor.numel() * (1 + tensor.is_complex())


class Bucket:
    """A flat buffer whose pieces are the gradients of its parameters.

    Args:
        plan: What it holds.
        parameters: The list that was planned, by place.
        names: What to call them, by place.
        reduction_dtype: What is sent; by default the gradients' own dtype.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        reduction_dtype: torch.dtype | None,
    ) -> None:
        self.plan = plan
        self.parameters = [parameters[slot.tensor] for slot in plan.slots]
        self.names = [names[slot.tensor] for slot in plan.slots]
        self._dtypes = [parameter.dtype for parameter in self.parameters]
        self.buffer = torch.zeros(
            plan.num_elements + len(plan.slots), dtype=plan.dtype, device=plan.device
        )
        self._used = self.buffer[plan.num_elements :]
        self._addresses = [
            self.buffer.data_ptr() + slot.offset * plan.dtype.itemsize for slot in plan.slots
        ]
        self._views = [
            view_like(parameter, slot.piece_of(self.buffer))
            for slot, parameter in zip(plan.slots, self.parameters, strict=True)
        ]
        self._message_dtype = reduction_dtype or plan.dtype
        self.is_received_early = self._message_dtype != plan.dtype
        """Whether a message has memory of its own, which is freed when it has arrived."""
        # Where the message is wider than the gradients, scaling it instead of them loses nothing.
        self._scales_message = self._message_dtype.itemsize > plan.dtype.itemsize

    def keep(self, position: int) -> None:
        """Moves a gradient into the buffer as it is, because it is not to be sent yet."""
        self._move(position, 1.0)

    def take(self, position: int, weight: float) -> bool:
        """Moves a gradient into the buffer; returns whether it was multiplied by the weight."""
        scale = 1.0 if self._scales_message else weight
        return self._move(position, scale) and scale != 1.0

    def pack(self, scaled: set[int], weight: float) -> Tensor:
        """Returns this rank's part of the sum, with zeros for what is missing.

        Args:
            scaled: Positions whose gradients are multiplied by the weight already.
            weight: Factor of this rank's gradients in the average.
        """
        self._fill(scaled, 1.0 if self._scales_message else weight)
        if self._message_dtype == self.plan.dtype:
            return self.buffer
        message = self.buffer.to(self._message_dtype)
        if self._scales_message:
            message[: self.plan.num_elements].mul_(weight)
        return message

    def start(self, message: Tensor, group: dist.ProcessGroup) -> dist.Work:
        """Starts to add up the ranks' messages."""
        work: dist.Work | None = dist.all_reduce(message, group=group, async_op=True)
        assert work is not None
        return work

    def unpack(self, message: Tensor) -> None:
        """Takes in the sum; gives a gradient to parameters that only other ranks had one for."""
        if message is not self.buffer:
            self.buffer.copy_(message)
        missing = [
            position for position, parameter in enumerate(self.parameters) if parameter.grad is None
        ]
        if missing:
            used = self._used.tolist()
            for position in missing:
                if used[position]:
                    self.parameters[position].grad = self._views[position]

    def _move(self, position: int, scale: float) -> bool:
        """Moves a gradient into the buffer, scaled on the way; False if it lay there already.

        Optimizers drop gradients after a step, and user code may set others: each comes back as
        a tensor of its own, and becomes a view of the buffer again here.
        """
        parameter = self.parameters[position]
        gradient = reducible_gradient(
            parameter, self.names[position], self._dtypes[position], self.plan.device
        )
        # Not whether it is the same object: converting a module lets that point elsewhere.
        if gradient.data_ptr() == self._addresses[position]:
            return False
        if gradient is self._views[position]:
            piece = self.plan.slots[position].piece_of(self.buffer)
            self._views[position] = view_like(parameter, piece)
        torch.mul(gradient, scale, out=self._views[position])
        parameter.grad = self._views[position]
        return True

    def _fill(self, scaled: set[int], scale: float) -> None:
        self._used.fill_(1)
        if len(scaled) == len(self.parameters):
            return
        for position, (parameter, view) in enumerate(
            zip(self.parameters, self._views, strict=True)
        ):
            if parameter.grad is None:
                view.zero_()
                self._used[position] = 0
            # A gradient of an earlier pass may have been replaced by user code since.
            elif position not in scaled and not self._move(position, scale) and scale != 1.0:
                view.mul_(scale)


def reducible_gradient(
    parameter: nn.Parameter, name: str, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns a parameter's gradient, or says why it cannot be added to those of other ranks.

    Args:
        parameter: Whose gradient has been computed.
        name: What to call it.
        dtype: What it was when its container was made.
        device: Where it was then.
    """
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
    if gradient.dtype != dtype or gradient.device != device:
        raise GradientError(
            f"parameter {name!r} was converted to {gradient.dtype} on {gradient.device} after "
            f"its container was made for {dtype} on {device}; convert it before"
        )
    if gradient.requires_grad:
        raise GradientError(
            f"the gradient of parameter {name!r} has a graph of its own: backward with "
            "create_graph=True cannot be averaged; use torch.autograd.grad for it"
        )
    return gradient


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
