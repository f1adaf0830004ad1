"""One layer of a fully sharded model: shards at rest, full parameters while in use, its gradients.

A layer whose parameters have several dtypes has one `ShardedLayer` per dtype. Parameters that are
not sharded form a layer with one shard, whose gradients are all-reduced.

At rest a rank holds only its flat shard. The shards of the parameters are views of it, so an
all-gather can send it directly after an optimizer's step, without a copy. The full parameters have
memory only while the layer is gathered. Their storages remain the same objects, so tensors that
autograd has saved for backward are valid again when the layer is gathered for the second time.

A layer's gradient message has one row per rank: that rank's rows of every gradient, followed by one
flag per parameter, which is 1 if the sender has a gradient for it. The flags are summed together
with the gradients, which shows each rank without another collective which parameters had a gradient
on any rank. Without synchronisation, full gradients stay on this rank, in the parameters' own
dtype, and are sent with the next message.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from paceline.core.errors import UsageError
from paceline.devices import accelerator
from paceline.parallel.buckets import RankWeight, reducible_gradient, view_like
from paceline.parallel.dtensor import as_dtensor, local_tensor
from paceline.parallel.fsdp.sharding import LayerLayout, Piece, Run, Sharding
from paceline.parallel.ranks.collectives import (
    ReduceScatter,
    start_all_gather,
    start_reduce_scatter,
)
from paceline.parallel.ranks.pending import Pending
from paceline.parallel.traffic import Traffic

Named: TypeAlias = tuple[str, nn.Parameter]


class PlainParameter(nn.Parameter):
    """A full plain parameter beside DTensors.

    On accelerators torch's optimizers update parameters together, which fails where plain tensors
    and DTensors mix; among them, one of a class that torch does not know makes it take a loop.
    """


@dataclasses.dataclass(eq=False, kw_only=True)
class LayerParameter:
    """One parameter in its sharded and full form."""

    name: str
    """Name in the inner module."""
    piece: Piece
    shard: nn.Parameter
    """The parameter of optimizers: a DTensor with this rank's rows, or a full plain tensor."""
    local: Tensor
    """This rank's rows, in the flat shard."""
    full: nn.Parameter
    """All rows, while the layer is gathered."""
    spec: DTensorSpec | None
    """Spec of the DTensor; None for a plain parameter."""

    def __post_init__(self) -> None:
        self._view = self.local.shape, self.local.stride(), self.local.storage_offset()

    def like_local(self, total: Tensor) -> Tensor:
        """Returns this rank's rows in a tensor with the positions of the flat shard."""
        return total.as_strided(*self._view)

    def require_in_place(self) -> None:
        """Raises if the shard is no longer a view of the flat shard, which is gathered."""
        own = local_tensor(self.shard)
        if own.dtype != self.local.dtype or own.device != self.local.device:
            raise UsageError(
                f"parameter {self.name!r} was converted to {own.dtype} on {own.device} after its "
                f"container was created for {self.local.dtype} on {self.local.device}; convert "
                "the model before wrapping it"
            )
        if own.data_ptr() != self.local.data_ptr():
            raise UsageError(
                f"the memory of parameter {self.name!r} was replaced after its container was "
                "created; change its values in place, with copy_ or load_state_dict"
            )

    def add_gradient(self, mean: Tensor) -> None:
        """Adds a mean to the shard's gradient, or sets it if there is none."""
        if self.shard.grad is not None:
            local_tensor(self.shard.grad).add_(mean)
        else:
            self.shard.grad = mean if self.spec is None else as_dtensor(mean, self.spec)


class GradientMessage:
    """The gradients of one layer."""

    def __init__(
        self,
        layout: LayerLayout,
        parameters: Sequence[LayerParameter],
        *,
        sharding: Sharding,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype | None,
        traffic: Traffic,
    ) -> None:
        self._layout = layout
        self._parameters = parameters
        self._sharding = sharding
        self._dtype = dtype
        wide = torch.float32 if dtype == torch.float16 else dtype
        self._reduce_dtype = reduce_dtype or wide
        self._sum_dtype = self._reduce_dtype if layout.dtype == torch.float16 else layout.dtype
        """The dtype of sums and means of messages; float16 cannot hold sums of large gradients."""
        self._traffic = traffic
        self._is_even = [piece.is_even(layout.num_shards) for piece in layout.pieces]
        self._open: Tensor | None = None
        self._open_columns: list[Tensor] = []
        """All ranks' pieces of each parameter in the open message."""
        self._in_open: set[int] = set()
        self._kept: Tensor | None = None
        self._in_kept: set[int] = set()
        self._writer: torch.Stream | None = None
        """The stream that wrote the message's last gradient."""
        self._in_flight: list[tuple[ReduceScatter, int]] = []
        self._sums: list[tuple[Tensor, Pending | None]] = []
        self.arrived: set[int] = set()
        """Positions of parameters whose gradient this rank has sent in this pass."""

    @property
    def unsent(self) -> list[str]:
        """Names of parameters whose gradients have not yet been sent in this pass."""
        return [self._parameters[position].name for position in sorted(self._in_open)]

    def take(self, position: int, *, keep: bool) -> None:
        """Moves a complete gradient of one of the parameters into the message.

        With `keep`, the gradient stays local until a later pass is averaged.
        """
        parameter = self._parameters[position]
        gradient = reducible_gradient(
            parameter.full, parameter.name, self._dtype, self._layout.device
        )
        parameter.full.grad = None
        self._follow_writer()
        if keep:
            self._kept = self._new(self._layout.dtype) if self._kept is None else self._kept
            target, present = self._kept, self._in_kept
        else:
            if self._open is None:
                self._open = self._new(self._reduce_dtype)
                self._open_columns = self._layout.columns(self._open)
            target, present = self._open, self._in_open
            if self._is_even[position] and position not in present and gradient.is_contiguous():
                column = self._open_columns[position]
                column.copy_(gradient.view(column.shape))
                present.add(position)
                return
        for rows, own in parameter.piece.blocks(target, gradient):
            # A second gradient in one pass comes from a reentrant checkpoint's nested backward.
            rows.add_(own) if position in present else rows.copy_(own)
        present.add(position)

    def send(self, weight: RankWeight | None) -> None:
        """Starts the reduce-scatter of the gradients, with zeros for missing ones.

        Without a weight, all ranks have equal weight.
        """
        self._follow_writer()
        message = self._open
        if message is None:
            message = self._new(self._reduce_dtype)
        if self._kept is not None:
            message = self._add_kept(message)
        length = self._layout.length
        present = self._in_open | self._in_kept
        message[:, length:].fill_(1)
        if len(present) < len(self._parameters):
            self._leave_out(message, present)
        if weight is not None:
            weight.scale([message[:, :length]])
        self.arrived |= present
        self._open = self._kept = None
        self._open_columns = []
        self._in_open, self._in_kept = set(), set()
        self._in_flight.append((self._start(message), self._traffic.num_messages))
        self._traffic.sent(message.nbytes, len(self._parameters))

    def _leave_out(self, message: Tensor, present: set[int]) -> None:
        """Writes zeros for the gradients that this rank does not have."""
        for position, piece in enumerate(self._layout.pieces):
            if position not in present:
                message[:, piece.offset : piece.offset + piece.num_elements].zero_()
                message[:, self._layout.length + position].zero_()

    def receive(self) -> None:
        """Waits for messages in flight, frees them, and starts the all-reduce over replicas."""
        in_flight, self._in_flight = self._in_flight, []
        for reduce_scatter, number in in_flight:
            self._traffic.wait(reduce_scatter, number)
            layout = self._layout
            total = torch.empty(layout.row_length, dtype=self._sum_dtype, device=layout.device)
            reduce_scatter.add_to(total, overwrite=True)
            groups = self._sharding.replicate_groups
            pending = None
            if groups:
                work = dist.all_reduce(total, group=groups[0].get(), async_op=True)
                pending = Pending("all-reduce of shards", total.nbytes, [work], total.device)
            self._sums.append((total, pending))

    def total(self) -> Tensor | None:
        """Returns the sum of all ranks' messages of this pass; None if there were none."""
        sums, self._sums = self._sums, []
        result: Tensor | None = None
        for total, pending in sums:
            if pending is not None:
                self._traffic.wait(pending)
            for group in self._sharding.replicate_groups[1:]:
                dist.all_reduce(total, group=group.get())
            result = total if result is None else result.add_(total)
        return result

    def add_means(
        self, total: Tensor, *, divide: bool, some_rank_had: Sequence[float] | None
    ) -> None:
        """Adds the means to the shards' gradients.

        `some_rank_had` says for each parameter whether any rank had a gradient for it; None if this
        rank had gradients for all trained parameters.
        """
        if divide:
            total.div_(self._sharding.num_ranks)  # The flags too, which nobody reads any more.
        total = total.to(self._layout.dtype)
        for position, parameter in enumerate(self._parameters):
            if position in self.arrived or (some_rank_had and some_rank_had[position]):
                parameter.add_gradient(parameter.like_local(total))
        self.arrived = set()

    @property
    def is_missing(self) -> bool:
        """Whether this rank had no gradient for some trained parameter."""
        return len(self.arrived) < len(self._parameters) and any(
            parameter.shard.requires_grad and position not in self.arrived
            for position, parameter in enumerate(self._parameters)
        )

    def flags(self, total: Tensor) -> Tensor:
        """Returns the flags that follow the gradients."""
        return total[self._layout.length : self._layout.length + len(self._parameters)]

    def drop(self) -> None:
        """Discards the gradients of a pass, except those kept for a later pass."""
        self._open, self._open_columns, self._in_open = None, [], set()
        self._in_flight, self._sums, self.arrived = [], [], set()
        for parameter in self._parameters:
            parameter.full.grad = None

    def _follow_writer(self) -> None:
        """Orders the current stream after the one that wrote the message, and makes it the writer.

        Autograd hands over gradients in the stream in which their parameters were created, and
        ends a layer's backward pass in that of its forward pass.
        """
        device = self._layout.device
        stream = accelerator.current_stream(device)
        if self._writer is not None and stream != self._writer:
            accelerator.follow(device, self._writer)
        self._writer = stream

    def _start(self, message: Tensor) -> ReduceScatter:
        group = self._sharding.shard_group
        if group is None:
            return ReduceScatter(message, [message[0]], [])
        return start_reduce_scatter(message.view(-1), group.get())

    def _add_kept(self, message: Tensor) -> Tensor:
        """Returns a message that includes kept gradients, summed in the parameters' dtype."""
        assert self._kept is not None
        for position in self._in_open:
            piece = self._parameters[position].piece
            columns = slice(piece.offset, piece.offset + piece.num_elements)
            if position in self._in_kept:
                self._kept[:, columns].add_(message[:, columns])
            else:
                self._kept[:, columns].copy_(message[:, columns])
        return self._kept.to(self._reduce_dtype)

    def _new(self, dtype: torch.dtype) -> Tensor:
        # Padding between the pieces is sent, but never read.
        layout = self._layout
        shape = (layout.num_shards, layout.row_length)
        return torch.empty(shape, dtype=dtype, device=layout.device)


class ShardedLayer:
    """Parameters of one dtype that are gathered and freed together.

    Shards that are plain tensors, instead of DTensors, belong to parameters that are not sharded.
    """

    @torch.no_grad()
    def __init__(
        self,
        layout: LayerLayout,
        named: Sequence[Named],
        *,
        sharding: Sharding,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        is_plain: bool,
        traffic: Traffic,
    ) -> None:
        self.layout = layout
        self.sharding = sharding
        self._traffic = traffic
        self._dtype = compute_dtype or layout.dtype
        self.flat = torch.zeros(layout.length, dtype=layout.dtype, device=layout.device)
        """This rank's shard of every parameter."""
        self._is_in_place = (
            layout.num_shards == 1
            and self._dtype == layout.dtype
            and all(parameter.is_contiguous() for _, parameter in named)
        )
        self._alone = self.flat
        """Receive buffer of large parameters, which are views of it."""
        if not self._is_in_place:
            self._alone = self._empty(layout.place_alone(layout.length))
        self._packed: Tensor | None = None
        """Receive buffer of small parameters, until they are copied out."""
        together = [piece for piece in layout.pieces if not layout.travels_alone(piece)]
        self._copies = self._empty(sum(piece.shape.numel() for piece in together))
        """The small full parameters, copied out of the receive buffer."""
        self._storages = [
            tensor.untyped_storage()
            for tensor in (self._alone, self._copies)
            if tensor is not self.flat and tensor.numel()
        ]
        self._copy_targets: list[Tensor] = []
        """All ranks' pieces in each of the small full parameters; empty if a piece has gaps."""
        if layout.packed_widths and all(parameter.is_contiguous() for _, parameter in named):
            sizes = [piece.shape.numel() for piece in together]
            copies = self._copies.split_with_sizes(sizes)
            self._copy_targets = [
                copy.view(layout.num_shards, width)
                for copy, width in zip(copies, layout.packed_widths, strict=True)
            ]
        copied = 0
        self.parameters: list[LayerParameter] = []
        for piece, (name, original) in zip(layout.pieces, named, strict=True):
            local = piece.local(self.flat, sharding.shard)
            if layout.travels_alone(piece):
                begin = layout.place_alone(piece.offset)
                full = self._alone[begin : begin + piece.shape.numel()].view(piece.shape)
            else:
                full = view_like(original, self._copies[copied : copied + original.numel()])
                copied += original.numel()
            spec = None if is_plain else sharding.spec(piece.shape, layout.dtype)
            self.parameters.append(
                LayerParameter(
                    name=name,
                    piece=piece,
                    shard=PlainParameter(local, original.requires_grad)
                    if spec is None
                    else nn.Parameter(as_dtensor(local, spec), original.requires_grad),
                    local=local,
                    full=nn.Parameter(full),
                    spec=spec,
                )
            )
        self.gradients = GradientMessage(
            layout,
            self.parameters,
            sharding=sharding,
            dtype=self._dtype,
            reduce_dtype=reduce_dtype,
            traffic=traffic,
        )
        self.num_users = 0
        """Number of running forward calls that need the full parameters."""
        self._arriving: list[Pending] = []
        self._ready: torch.Event | None = None
        self._is_filled = False
        self._is_gathered = True
        self.free()

    @property
    def is_trained(self) -> bool:
        """Whether any parameter is trained."""
        return any(parameter.shard.requires_grad for parameter in self.parameters)

    @property
    def num_present_bytes(self) -> int:
        """Memory of the full parameters, excluding the shard."""
        arriving = 0 if self._packed is None else self._packed.nbytes
        return arriving + sum(storage.nbytes() for storage in self._storages)

    def addresses(self) -> list[int]:
        """Returns the addresses of the full parameters' storages; zero without memory."""
        return [storage.data_ptr() for storage in self._storages]

    @property
    def is_gathered(self) -> bool:
        """Whether the full parameters have memory, or are about to."""
        return self._is_gathered

    @torch.no_grad()
    def take_values(self, position: int, full: Tensor) -> None:
        """Copies this rank's rows of a full parameter's values into its shard."""
        parameter = self.parameters[position]
        rows = full if full.dim() else full.unsqueeze(0)
        own = parameter.piece.own_rows(rows, self.sharding.shard)
        parameter.local.copy_(own.view(parameter.local.shape))

    def start_all_gather(self) -> None:
        """Starts the all-gather of the full parameters, unless the layer is gathered."""
        if self._is_gathered:
            return
        self._is_gathered = True
        for parameter in self.parameters:
            if parameter.full.requires_grad != parameter.shard.requires_grad:
                parameter.full.requires_grad_(parameter.shard.requires_grad)
        if self._is_in_place:
            return
        _allocate(self._alone)
        self._packed = self._empty(self.layout.packed_length * self.layout.num_shards)
        # Tensors saved by autograd must count as unchanged: they get the same values again.
        with _unsafe_preserve_version_counter(self._alone):
            self._arriving = _gather(
                self.flat, self._alone, self._packed, self.layout, self.sharding
            )

    def wait(self) -> None:
        """Makes the current stream wait until the full parameters have arrived."""
        if self._ready is not None:
            accelerator.wait_in_stream(self.layout.device, self._ready)
        if self._is_filled or self._is_in_place:
            return
        self._is_filled = True
        self._receive()
        assert self._packed is not None
        if self.layout.packed_length:
            _allocate(self._copies)
            with _unsafe_preserve_version_counter(self._copies):
                self._copy_small(self._packed)
        self._packed = None
        # Later waits in other streams must wait for the copies too.
        self._ready = accelerator.point_in_stream(self.layout.device)

    def _copy_small(self, packed: Tensor) -> None:
        """Copies the small full parameters out of their receive buffer."""
        layout = self.layout
        if self._copy_targets:
            assert layout.packed_widths is not None
            rows = packed.view(layout.num_shards, layout.packed_length)
            torch.split_with_sizes_copy(rows, layout.packed_widths, 1, out=self._copy_targets)
            return
        for run in layout.runs:
            if not run.is_one:
                rows = layout.rows(run, self._alone, packed)
                _copy_out(rows, run, layout, [parameter.full for parameter in self.parameters])

    def free(self) -> None:
        """Frees the memory of the full parameters, unless a forward pass uses them."""
        if self._is_gathered and self.num_users == 0:
            self._is_gathered = self._is_filled = False
            self._receive()
            self._ready = self._packed = None
            for storage in self._storages:
                storage.resize_(0)

    def _receive(self) -> None:
        arriving, self._arriving = self._arriving, []
        for one in arriving:
            self._traffic.wait(one)

    def reset(self) -> None:
        """Frees full parameters and drops gradients; call only if no peer waits for a message."""
        self.num_users = 0
        self.free()
        self.gradients.drop()

    @torch.no_grad()
    def gather_full(self) -> dict[nn.Parameter, Tensor]:
        """Returns full parameters in their own dtype, by shard; all ranks must call it."""
        layout = self.layout
        alone = self._empty(layout.place_alone(layout.length), layout.dtype)
        packed = self._empty(layout.packed_length * layout.num_shards, layout.dtype)
        for one in _gather(self.flat, alone, packed, layout, self.sharding):
            one.wait()
        full = [
            torch.empty_like(parameter.full, dtype=layout.dtype) for parameter in self.parameters
        ]
        for run in layout.runs:
            _copy_out(layout.rows(run, alone, packed), run, layout, full)
        return {p.shard: tensor for p, tensor in zip(self.parameters, full, strict=True)}

    def _empty(self, length: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(length, dtype=dtype or self._dtype, device=self.layout.device)


def _allocate(tensor: Tensor) -> None:
    """Allocates memory for a tensor whose storage was freed."""
    if num_bytes := tensor.nbytes:
        tensor.untyped_storage().resize_(num_bytes)


def _gather(
    flat: Tensor, alone: Tensor, packed: Tensor, layout: LayerLayout, sharding: Sharding
) -> list[Pending]:
    """Starts the all-gather of every run of the flat shards."""
    arriving = []
    for run in layout.runs:
        rows = layout.rows(run, alone, packed)
        rows[sharding.shard].copy_(flat[run.begin : run.end])
        if sharding.shard_group is not None:
            borders = range(0, rows.numel() + 1, run.end - run.begin)
            group = sharding.shard_group.get()
            arriving.append(start_all_gather(rows.view(-1), borders, group))
    return arriving


def _copy_out(rows: Tensor, run: Run, layout: LayerLayout, full: Sequence[Tensor]) -> None:
    """Copies the full parameters of a run out of their receive buffer."""
    for piece, tensor in zip(layout.pieces, full, strict=True):
        if piece in run:
            for source, target in piece.blocks(rows, tensor, begin=run.begin):
                target.copy_(source)
