"""Gradients in few, flat, contiguous pieces.

The plan is a pure function of the parameters and the cap, so every rank arrives at the same one,
on every run and after every restart. Parameters are taken in reverse order, because backward
reaches the last layers first. A bucket holds one dtype on one device; how sizes grow up to the cap
and shrink again is `paceline.accounting.communication.buckets`'s.

A bucket's buffer holds its gradients and, behind them, one number per parameter: 1 where this rank
has a gradient for it. Summed over the ranks with everything else, they tell without a further
call whether any rank had one.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.accounting.communication.buckets import aligned, divide_into_buckets
from paceline.core.errors import PacelineError
from paceline.parallel.ranks.rank_weight import RankWeight


class GradientError(PacelineError):
    """A gradient that cannot be synchronised, naming its parameter."""


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns what this rank holds of a tensor, as a plain one that shares its memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """Returns all of a tensor, as a plain one; ranks that have parts of it call it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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
        self._missing: list[int] = []
        """Positions that this rank had no gradient for in the last pass."""
        # Where the message is wider than the gradients, scaling it instead of them loses nothing.
        self._scales_message = self._message_dtype.itemsize > plan.dtype.itemsize

    def keep(self, position: int) -> None:
        """Moves a gradient into the buffer as it is, because it is not to be sent yet."""
        self._move((position,), None)

    def take(self, positions: Sequence[int], weight: RankWeight) -> None:
        """Moves gradients into the buffer, multiplied by the weight unless the message will be."""
        self._move(positions, None if self._scales_message else weight)

    def pack(self, taken: set[int], weight: RankWeight) -> Tensor:
        """Returns this rank's part of the sum, with zeros for what is missing.

        Args:
            taken: Positions whose gradients were taken in already.
            weight: Weight of this rank's gradients in the average.
        """
        self._fill(taken, weight)
        if self._message_dtype == self.plan.dtype:
            return self.buffer
        message = self.buffer.to(self._message_dtype)
        if self._scales_message:
            weight.scale([message[: self.plan.num_elements]])
        return message

    def start(self, message: Tensor, group: dist.ProcessGroup) -> dist.Work:
        """Starts to add up the ranks' messages."""
        work: dist.Work | None = dist.all_reduce(message, group=group, async_op=True)
        assert work is not None
        return work

    def unpack(self, message: Tensor) -> None:
        """Takes in the sum."""
        if message is not self.buffer:
            self.buffer.copy_(message)

    def _move(self, positions: Sequence[int], weight: RankWeight | None) -> None:
        """Moves gradients into the buffer, multiplied by a weight if there is one.

        Optimizers drop gradients after a step, and user code may set others: each comes back as
        a tensor of its own, and becomes a view of the buffer again here.
        """
        gradients: list[Tensor] = []
        targets: list[Tensor] = []
        there: list[Tensor] = []
        for position in positions:
            parameter = self.parameters[position]
            gradient = reducible_gradient(
                parameter, self.names[position], self._dtypes[position], self.plan.device
            )
            # Not whether it is the same object: converting a module lets that point elsewhere.
            if gradient.data_ptr() == self._addresses[position]:
                there.append(gradient)
                continue
            view = self._views[position]
            if gradient is view:
                piece = self.plan.slots[position].piece_of(self.buffer)
                view = self._views[position] = view_like(parameter, piece)
            gradients.append(gradient)
            targets.append(view)
            parameter.grad = view
        if weight is None:
            if gradients:
                torch._foreach_copy_(targets, gradients)
            return
        weight.scale_into(gradients, targets)
        if there:
            weight.scale(there)

    def _fill(self, taken: set[int], weight: RankWeight) -> None:
        self._used.fill_(1)
        self._missing = []
        if len(taken) == len(self.parameters):
            return
        left = []
        for position, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                self._views[position].zero_()
                self._used[position] = 0
                self._missing.append(position)
            elif position not in taken:
                left.append(position)
        # A gradient of an earlier pass may have been replaced by user code since.
        self.take(left, weight)


def give_missing_gradients(buckets: Iterable[Bucket]) -> None:
    """Gives a gradient to parameters that only other ranks had one for, when all sums are here.

    Only where this rank has none, whether others have one is read, once for all buckets: that waits
    for the device, and optimizers treat a gradient of zeros unlike none.
    """
    missing = [(bucket, position) for bucket in buckets for position in bucket._missing]
    if missing:
        used = torch.stack([bucket._used[position].float() for bucket, position in missing])
        for (bucket, position), is_used in zip(missing, used.tolist(), strict=True):
            if is_used:
                bucket.parameters[position].grad = bucket._views[position]


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
            f"the gradient of parameter {name!r} was cleared during backward; clear gradients "
            "after backward"
        )
    if gradient.layout != torch.strided:
        raise GradientError(
            f"parameter {name!r} has a {gradient.layout} gradient; only dense ones can be "
            "synchronised: create its layer with sparse=False"
        )
    if gradient.dtype != dtype or gradient.device != device:
        raise GradientError(
            f"parameter {name!r} was converted to {gradient.dtype} on {gradient.device} after its "
            f"container was created for {dtype} on {device}; convert the model before wrapping it"
        )
    if gradient.requires_grad:
        raise GradientError(
            f"the gradient of parameter {name!r} has its own autograd graph: backward with "
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
