"""Gradient buckets: gradients packed into a few flat, contiguous buffers.

The plan is a pure function of the parameters and the cap, so every rank computes the same plan,
on every run and after every restart. Parameters are taken in reverse order, because backward
reaches the last layers first. A bucket holds one dtype on one device.
`paceline.accounting.buckets` defines how sizes grow up to the cap and shrink again.

A bucket's buffer holds its gradients, followed by one flag per parameter: 1 if this rank has a
gradient for it. The flags are summed over the ranks together with the gradients, which shows
without another collective whether any rank had a gradient.

A rank's weight in the average stays on the device: reading the sum of all weights on the host would
wait for the device in every backward pass.
"""

import abc
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.accounting.buckets import aligned, divide_into_buckets
from paceline.core.errors import PacelineError
from paceline.parallel.ranks.pending import Pending


class GradientError(PacelineError):
    """A gradient that cannot be synchronised; the message names its parameter."""


class TensorSpec(NamedTuple):
    """The properties of a tensor that determine its position in a plan."""

    num_elements: int
    """Number of real elements; a complex element counts as two."""
    dtype: torch.dtype
    device: torch.device


class Slot(NamedTuple):
    """The position of a tensor in its bucket."""

    tensor: int
    """The tensor's index in the planned list."""
    offset: int
    num_elements: int

    def piece_of(self, buffer: Tensor) -> Tensor:
        """Returns the flat slice of a bucket's buffer that holds the tensor's elements."""
        return buffer[self.offset : self.offset + self.num_elements]


class BucketPlan(NamedTuple):
    """The layout of one bucket, with its tensors in the order in which backward reaches them."""

    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]
    num_elements: int
    """Elements of all tensors, including padding."""

    def message_bytes(self, reduction_dtype: torch.dtype | None) -> int:
        """Returns the size of the bucket's message in `reduction_dtype` or the bucket's dtype."""
        return (self.num_elements + len(self.slots)) * (reduction_dtype or self.dtype).itemsize


def plan_buckets(tensors: Sequence[TensorSpec], cap_bytes: float | None) -> list[BucketPlan]:
    """Divides tensors into buckets of at most `cap_bytes`, in launch order.

    Without a cap there is one bucket per dtype and device; a cap of zero gives one per tensor.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index in range(len(tensors) - 1, -1, -1):
        _, dtype, device = tensors[index]
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
    """Places tensors one after another, each aligned."""
    itemsize = dtype.itemsize
    offset = 0
    slots = []
    for index in indices:
        num_elements = tensors[index].num_elements
        slots.append(Slot(index, offset, num_elements))
        offset += aligned(num_elements, itemsize)
    return BucketPlan(dtype, device, tuple(slots), offset)


def tensor_spec(tensor: Tensor) -> TensorSpec:
    """Describes a tensor for a plan."""
    dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    return TensorSpec(num_reals(tensor), dtype, tensor.device)


def num_reals(tensor: Tensor) -> int:
    """Returns the number of real elements of a tensor; a complex element counts as two."""
    return tensor.numel() * (1 + tensor.is_complex())


_SMALL_ELEMENTS = 2**14
"""Up to this size, a call per tensor costs more than a second pass over its memory."""


class RankWeight:
    """A scale factor for this rank's gradients.

    On a rank with weight zero, `is_void` is true on the device unless all ranks have weight zero:
    its gradients are then replaced with zeros.
    """

    def __init__(self, factor: float | Tensor, is_void: Tensor | None = None) -> None:
        self._factor = factor
        self._is_void = is_void

    @classmethod
    def of(cls, own: float, total: Tensor, num_ranks: int) -> "RankWeight":
        """Returns a weight's share of the sum of all weights; equal shares if the sum is zero."""
        is_counted = total > 0
        factor = torch.where(is_counted, own / total, 1 / num_ranks)
        return cls(factor, is_counted if own == 0 else None)

    def scale(self, tensors: list[Tensor]) -> None:
        """Scales tensors in place; sets them to zero if this rank has weight zero."""
        torch._foreach_mul_(tensors, self._factor)
        if self._is_void is not None:
            for tensor in tensors:
                tensor.masked_fill_(self._is_void, 0)  # Zero times inf or NaN is NaN, not zero.

    def scale_into(self, gradients: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Writes scaled gradients to tensors of the same shapes.

        Small gradients are copied and scaled as a group, because a call per tensor would dominate
        their cost. Large gradients are scaled in one pass over memory each. To round each number
        only once, gradients are scaled after the copy to a wider dtype, but before the conversion
        to a narrower one.
        """
        together: list[tuple[Tensor, Tensor]] = []
        for gradient, target in zip(gradients, targets, strict=True):
            change = target.dtype.itemsize - gradient.dtype.itemsize
            if change > 0 or (change == 0 and gradient.numel() <= _SMALL_ELEMENTS):
                together.append((gradient, target))
            else:
                torch.mul(gradient, self._factor, out=target)
                if self._is_void is not None:
                    target.masked_fill_(self._is_void, 0)
        if together:
            copies = [target for _, target in together]
            torch._foreach_copy_(copies, [gradient for gradient, _ in together])
            self.scale(copies)


class GradientBucket(abc.ABC):
    """Gradients that are sent in one message.

    Parameters and names are in the order of the plan's slots.
    """

    is_received_early: bool
    """Whether messages use separate memory, which is freed when they have been received."""

    def __init__(
        self, plan: BucketPlan, parameters: Sequence[nn.Parameter], names: Sequence[str]
    ) -> None:
        self.plan = plan
        self.parameters = parameters
        self.names = names
        self._dtypes = [parameter.dtype for parameter in parameters]

    @abc.abstractmethod
    def keep(self, position: int) -> None:
        """Accepts a gradient that is not sent in this pass."""

    @abc.abstractmethod
    def take(self, positions: Sequence[int], weight: RankWeight) -> None:
        """Moves gradients into the message, scaled by the weight."""

    def pack(self, taken: set[int], weight: RankWeight) -> Tensor:
        """Returns this rank's summand, with zeros for missing gradients.

        `take` has already moved the gradients of the positions in `taken`.
        """
        left = []
        for position in range(len(self.parameters)):
            if position in taken:
                continue
            if self._has_gradient(position):
                left.append(position)
            else:
                self._leave_out(position)
        # User code may have replaced a gradient of an earlier pass.
        self.take(left, weight)
        return self._message(weight)

    @abc.abstractmethod
    def start(self, message: Tensor, group: dist.ProcessGroup) -> dist.Work | Pending:
        """Starts the collective."""

    def sent_bytes(self, message: Tensor) -> int:
        """Returns the size of a message as it is sent."""
        return message.nbytes

    @abc.abstractmethod
    def unpack(self, message: Tensor) -> None:
        """Stores the reduced message."""

    @abc.abstractmethod
    def _leave_out(self, position: int) -> None:
        """Writes zeros for a gradient that this rank does not have, and remembers that."""

    @abc.abstractmethod
    def _message(self, weight: RankWeight) -> Tensor:
        """Returns the message, which contains all gradients."""

    def _has_gradient(self, position: int) -> bool:
        return self.parameters[position].grad is not None

    def _gradient(self, position: int) -> Tensor:
        return reducible_gradient(
            self.parameters[position],
            self.names[position],
            self._dtypes[position],
            self.plan.device,
        )


class Bucket(GradientBucket):
    """A flat buffer whose slices are the gradients of its parameters; it is all-reduced.

    `Slot.tensor` of the plan indexes `parameters` and `names`.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        reduction_dtype: torch.dtype | None,
    ) -> None:
        super().__init__(
            plan,
            [parameters[slot.tensor] for slot in plan.slots],
            [names[slot.tensor] for slot in plan.slots],
        )
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
        self._missing: list[int] = []
        """Positions without a gradient on this rank in the last pass."""
        # If the message dtype is wider than the gradients', scaling the message loses no precision.
        self._scales_message = self._message_dtype.itemsize > plan.dtype.itemsize

    def keep(self, position: int) -> None:
        """Moves a gradient into the buffer unscaled, because it is not sent in this pass."""
        self._move((position,), None)

    def take(self, positions: Sequence[int], weight: RankWeight) -> None:
        """Moves gradients into the buffer, scaled by the weight unless `pack` scales them."""
        self._move(positions, None if self._scales_message else weight)

    def pack(self, taken: set[int], weight: RankWeight) -> Tensor:
        """Returns this rank's summand, with zeros and flags of zero for missing gradients."""
        self._used.fill_(1)
        self._missing = []
        if len(taken) < len(self.parameters):
            # User code may have cleared a gradient that was taken; the rank then has none.
            taken = {position for position in taken if self._has_gradient(position)}
        return super().pack(taken, weight)

    def _leave_out(self, position: int) -> None:
        self._views[position].zero_()
        self._used[position] = 0
        self._missing.append(position)

    def _message(self, weight: RankWeight) -> Tensor:
        if self._message_dtype == self.plan.dtype:
            return self.buffer
        message = self.buffer.to(self._message_dtype)
        if self._scales_message:
            weight.scale([message[: self.plan.num_elements]])
        return message

    def start(self, message: Tensor, group: dist.ProcessGroup) -> dist.Work | Pending:
        """Starts the all-reduce of the ranks' messages."""
        work: dist.Work | None = dist.all_reduce(message, group=group, async_op=True)
        assert work is not None
        return work

    def unpack(self, message: Tensor) -> None:
        """Copies the reduced message into the buffer, unless it is the buffer."""
        if message is not self.buffer:
            self.buffer.copy_(message)

    def _move(self, positions: Sequence[int], weight: RankWeight | None) -> None:
        """Moves gradients into the buffer, scaled by the weight if one is given.

        Optimizers drop gradients after a step, and user code may assign others. Each new gradient
        is a separate tensor until this method replaces it with a view of the buffer.
        """
        gradients: list[Tensor] = []
        targets: list[Tensor] = []
        there: list[Tensor] = []
        for position in positions:
            parameter = self.parameters[position]
            gradient = self._gradient(position)
            # Compares addresses, not objects: converting a module can repoint the same object.
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


def give_missing_gradients(buckets: Iterable[Bucket]) -> None:
    """Sets the gradient of parameters that only other ranks had one for; call after all sums.

    The distinction matters because optimizers treat a zero gradient differently from none. Reading
    the flags waits for the device, so they are read once for all buckets, and only for parameters
    that have no gradient on this rank.
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
    """Returns a parameter's gradient; raises if it cannot be reduced with those of other ranks.

    `dtype` and `device` are those of the parameter when its container was created.
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
    """Returns a view of a flat piece in a parameter's shape, with its strides if it is dense."""
    if parameter.is_complex():
        return torch.view_as_complex(piece.view(*parameter.shape, 2))
    return piece.as_strided(*shape_and_strides(parameter), piece.storage_offset())


def shape_and_strides(parameter: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    """Returns a real parameter's shape, and its strides if it is dense, or else contiguous ones."""
    if _is_dense(parameter):
        return parameter.shape, parameter.stride()
    return parameter.shape, torch.empty(parameter.shape, device="meta").stride()


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return tensor.numel() > 0
