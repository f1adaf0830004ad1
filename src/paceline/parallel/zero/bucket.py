"""Buckets whose gradients are reduce-scattered, and the parameters that a container shards.

A bucket's message is as large as its parameters, and exists only while it is filled and in flight.
Gradients are moved into it as backward completes them, and freed. When the message has arrived,
this rank's shard of the sum is added to its shards' gradients, and the message is freed. Only the
gradient of the shard persists from step to step.

A parameter whose gradient was moved into a message has a `ReducedGradient` instead: a tensor
without memory that raises when used, with an error that names the alternatives. If it were None,
the norm over all gradients would be 0, and a plain optimizer would silently do nothing.

Which parameters had a gradient on any rank, ranks exchange in one small message per backward pass,
sent after the last bucket. Reading the result waits for the device. A rank reads it only for
parameters without a gradient of its own, and only once per optimizer step, regardless of the number
of passes.
"""

import gc
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from paceline.core.errors import UsageError
from paceline.devices.accelerator import Moment
from paceline.parallel.buckets import BucketPlan, GradientBucket, RankWeight, shape_and_strides
from paceline.parallel.ranks.collectives import GroupReference, ReduceScatter, start_reduce_scatter
from paceline.parallel.ranks.pending import Pending
from paceline.parallel.zero.flat_parameters import FlatParameters


class ReducedGradient(Tensor):
    """A gradient whose elements are on the ranks that own them."""

    parameter_name: str
    received: Tensor | None
    """The gradient that later backward passes have added, for the next message."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[Self], parameter: Tensor, name: str) -> Self:  # noqa: D102
        made: Self = Tensor._make_wrapper_subclass(
            cls,
            parameter.size(),
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        made.parameter_name = name
        made.received = None
        return made

    def __init__(self, *_: object) -> None:
        pass

    def untyped_storage(self) -> torch.UntypedStorage:
        """Returns an empty storage, for code that counts memory."""
        return torch.UntypedStorage(0, device=self.device)  # type: ignore[no-untyped-call]

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"<gradient of {self.parameter_name!r}, reduce-scattered>"

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, _types: Sequence[type], arguments: Any = (), _keywords: Any = None
    ) -> Any:
        first = arguments[0]
        if isinstance(first, ReducedGradient):
            if function is _aten.add_.Tensor:  # Autograd adds the next pass's gradient.
                more = arguments[1]
                first.received = more if first.received is None else first.received + more
                return first
            if function is _aten.add.Tensor:  # The same, out of place (create_graph=True).
                return arguments[1]
            if function in _CHANGES_NOTHING:
                return first
        if function is _aten._foreach_zero_.default:
            return None
        name = next(_reduced_in(arguments)).parameter_name
        raise UsageError(
            f"the gradient of parameter {name!r} was reduce-scattered, and each rank has its own "
            "shard of it only: clip with the container's clip_grad_norm_(), update with a "
            "ShardedOptimizer of its parameters; for whatever needs whole gradients, such as a "
            "GradScaler, use BucketedDataParallel"
        )


_aten = torch.ops.aten


_CHANGES_NOTHING = frozenset({_aten.zero_.default, _aten.detach.default, _aten.alias.default})


def _reduced_in(arguments: Any) -> Any:
    for argument in arguments:
        if isinstance(argument, ReducedGradient):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _reduced_in(argument)


_known: MutableMapping[Tensor, "weakref.ref[ShardedParameters]"] = WeakIdKeyDictionary()


class ShardedParameters:
    """The flat parameters of one container, one object per bucket, and their use by ranks.

    They are in the order in which the next forward pass needs them.
    """

    def __init__(self, flats: Sequence[FlatParameters], group: GroupReference) -> None:
        self.flats = flats
        self.group = group
        self._ids = {id(parameter) for flat in flats for parameter in flat.parameters}
        """Identities of the parameters, which live as long as this object."""
        self._find_optimizer: Callable[[], Optimizer | None] = lambda: None
        self._missing: list[int] = []
        self._passes: list[tuple[Tensor, Pending]] = []
        """For each pass, the number of ranks that had a gradient for each parameter."""
        for flat in flats:
            for parameter in flat.parameters:
                _known[parameter] = weakref.ref(self)

    @property
    def has_optimizer(self) -> bool:
        """Whether an optimizer is attached and alive."""
        return self._find_optimizer() is not None

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._ids

    def attach(self, optimizer: Optimizer) -> None:
        """Registers the optimizer that updates this rank's shards."""
        if self._find_optimizer() not in (None, optimizer):
            gc.collect()  # The old optimizer may be unreachable, but held by a reference cycle.
        if self._find_optimizer() not in (None, optimizer):
            raise UsageError(
                "the parameters of a ShardedDataParallel already belong to another "
                "ShardedOptimizer; give one optimizer several groups instead"
            )
        self._find_optimizer = weakref.ref(optimizer)

    def note_missing(self, index: int) -> None:
        """Records that this rank has no gradient for a parameter in this pass."""
        self._missing.append(index)

    def start_counting(self) -> None:
        """Starts the all-reduce of this pass's counts."""
        device = self.flats[0].layout.device
        counts = torch.ones(sum(len(flat.parameters) for flat in self.flats), device=device)
        for index in self._missing:
            counts[index] = 0
        self._missing = []
        work = dist.all_reduce(counts, group=self.group.get(), async_op=True)
        pending = Pending("count of gradients", counts.nbytes, [work], device)
        self._passes.append((counts, pending))

    def decide_gradients(self) -> None:
        """Sets the gradient of undecided shards that had one on any rank.

        Waits for the device only if there are undecided shards.
        """
        undecided = [item for flat in self.flats for item in flat.undecided.items()]
        passes = self._end_passes()
        if undecided:
            indices = [index for _, (index, _) in undecided]
            had_one = torch.stack([counts[indices] for counts in passes]).sum(0) > 0
            for (shard, (_, total)), is_used in zip(undecided, had_one.tolist(), strict=True):
                if is_used:
                    shard.tensor.grad = total
        for flat in self.flats:
            flat.undecided.clear()

    def _end_passes(self) -> list[Tensor]:
        """Waits for the counts of the recorded passes, and returns and clears them."""
        for _, pending in self._passes:
            pending.wait()
        passes, self._passes = self._passes, []
        return [counts for counts, _ in passes]

    def zero_gradients(self, *, set_to_none: bool) -> None:
        """Clears the gradients of all shards."""
        if set_to_none:
            self._end_passes()
        else:
            self.decide_gradients()
        for flat in self.flats:
            flat.zero_gradients(set_to_none=set_to_none)

    @property
    def are_in_flight(self) -> bool:
        """Whether a reader of some parameter has to wait."""
        return any(flat.arriving.are_in_flight for flat in self.flats)

    def take_waits(self) -> list[tuple[Moment, Moment]]:
        """Returns and clears the recorded waits of readers for parameters."""
        waits = [moments for flat in self.flats for moments in flat.arriving.waits]
        for flat in self.flats:
            flat.arriving.waits.clear()
        return waits

    def time_waits(self) -> None:
        """Turns on timing of the readers' waits."""
        for flat in self.flats:
            flat.arriving.is_timed = True

    def wait(self) -> None:
        """Waits until all parameters have their new values."""
        for flat in self.flats:
            flat.wait()


def find_sharded_parameters(parameter: nn.Parameter) -> ShardedParameters | None:
    """Returns the sharded parameters that contain a parameter; None if it is not sharded."""
    reference: Any = _known.get(parameter)
    return None if reference is None else reference()


class ShardedBucket(GradientBucket):
    """A bucket that is reduce-scattered."""

    is_received_early = True

    def __init__(
        self,
        plan: BucketPlan,
        flat: FlatParameters,
        shared: ShardedParameters,
        *,
        message_dtype: torch.dtype,
        sends_counts: bool,
    ) -> None:
        super().__init__(plan, flat.parameters, flat.names)
        self._flat = flat
        self._shared = shared
        self._reduced = [
            ReducedGradient(*named) for named in zip(flat.parameters, flat.names, strict=True)
        ]
        self._message_dtype = message_dtype
        self._sends_counts = sends_counts
        self._buffer: Tensor | None = None
        self._views: list[Tensor] = []
        self._places = [
            (*_shape_and_strides(parameter), slot.offset)
            for slot, parameter in zip(plan.slots, self.parameters, strict=True)
        ]
        """Shape, strides and offset of each view of the buffer."""
        self._missing: dict[nn.Parameter, int] = {}
        """Parameters without a gradient on this rank, and their indices in the container."""
        self._reduce_scatter: ReduceScatter | None = None
        self._gaps = list(_gaps(plan, flat.layout.num_elements))
        flat.gradient = torch.zeros_like(flat.master)

    def keep(self, position: int) -> None:
        """Leaves a gradient in place, because it is not sent in this pass."""
        parameter = self.parameters[position]
        self._flat.local_gradients.add(parameter)
        # A tensor added to a reduced gradient may also be another parameter's gradient: copy it.
        is_shared = type(parameter.grad) is ReducedGradient
        gradient = self._gradient(position)
        if is_shared:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)

    def take(self, positions: Sequence[int], weight: RankWeight) -> None:
        """Moves gradients into the message, scaled by the weight."""
        if self._buffer is None:
            self._open()
        gradients = [self._gradient(position) for position in positions]
        weight.scale_into(
            [torch.view_as_real(grad) if grad.is_complex() else grad for grad in gradients],
            [self._views[position] for position in positions],
        )
        for position in positions:
            self.parameters[position].grad = self._reduced[position]
            if self._flat.local_gradients:
                self._flat.local_gradients.discard(self.parameters[position])

    def pack(self, taken: set[int], weight: RankWeight) -> Tensor:
        """Returns the message, with zeros for missing gradients."""
        if self._buffer is None:
            self._open()
        return super().pack(taken, weight)

    def _leave_out(self, position: int) -> None:
        index = self.plan.slots[position].tensor
        self._views[position].zero_()
        self._missing[self.parameters[position]] = index
        self._shared.note_missing(index)

    def _message(self, _weight: RankWeight) -> Tensor:
        assert self._buffer is not None
        return self._buffer

    def start(self, message: Tensor, group: dist.ProcessGroup) -> ReduceScatter:
        """Starts the reduce-scatter."""
        self._reduce_scatter = self._send(message, group)
        if self._sends_counts:
            self._shared.start_counting()
        return self._reduce_scatter

    def _send(self, message: Tensor, group: dist.ProcessGroup) -> ReduceScatter:
        return start_reduce_scatter(message, group)

    def unpack(self, _message: Tensor) -> None:
        """Adds this rank's shard of the sum to its shards' gradients, and frees the message."""
        assert self._reduce_scatter is not None
        is_accumulating = bool(self._flat.undecided) or any(
            shard.tensor.grad is not None for shard in self._flat.shards
        )
        if is_accumulating:
            for shard in self._flat.shards:
                if shard.tensor.grad is None and shard not in self._flat.undecided:
                    self._flat.gradient_of(shard).zero_()
        self._reduce_scatter.add_to(self._flat.gradient, overwrite=not is_accumulating)
        self._reduce_scatter = self._buffer = None
        self._views = []
        self._give_gradients()

    def _give_gradients(self) -> None:
        """Sets the shards' gradients, except for parameters without a gradient on this rank."""
        for shard in self._flat.shards:
            if shard.parameter not in self._missing:
                self._flat.undecided.pop(shard, None)
                shard.tensor.grad = self._flat.gradient_of(shard)
            elif shard.tensor.grad is None:
                index = self._missing[shard.parameter]
                self._flat.undecided[shard] = index, self._flat.gradient_of(shard)
        self._missing = {}
        self._flat.was_trained |= self._flat.is_trained

    def _has_gradient(self, position: int) -> bool:
        gradient = self.parameters[position].grad
        if type(gradient) is ReducedGradient:
            return gradient.received is not None
        return gradient is not None

    def _gradient(self, position: int) -> Tensor:
        gradient = self.parameters[position].grad
        if type(gradient) is ReducedGradient:
            self.parameters[position].grad, gradient.received = gradient.received, None
        return super()._gradient(position)

    def _open(self) -> None:
        num_elements = self._flat.layout.num_elements
        self._buffer = torch.empty(num_elements, dtype=self._message_dtype, device=self.plan.device)
        for begin, end in self._gaps:
            self._buffer[begin:end] = 0  # The optimizer updates the gaps together with the shards.
        self._views = [self._buffer.as_strided(*place) for place in self._places]


def _shape_and_strides(parameter: Tensor) -> tuple[Sequence[int], Sequence[int]]:
    if not parameter.is_complex():
        return shape_and_strides(parameter)
    # Complex numbers are sent as pairs of reals: there are no narrow complex dtypes.
    pairs = torch.empty((*parameter.shape, 2), device="meta")
    return pairs.shape, pairs.stride()


def _gaps(plan: BucketPlan, num_elements: int) -> Iterator[tuple[int, int]]:
    """Yields the padding ranges between a bucket's tensors and after the last one."""
    end = 0
    for slot in plan.slots:
        if slot.offset > end:
            yield end, slot.offset
        end = slot.offset + slot.num_elements
    if num_elements > end:
        yield end, num_elements
