"""One layer of a fully sharded model: shards at rest, full parameters while in use.

A layer whose parameters have several dtypes has one `ShardedLayer` per dtype. Parameters that are
not sharded form a layer with one shard, whose gradients are all-reduced.

At rest a rank holds only its flat shard. The shards of the parameters are views of it, so an
all-gather can send it directly after an optimizer's step, without a copy. The full parameters have
memory only while the layer is gathered. Their storages remain the same objects, so tensors that
autograd has saved for backward are valid again when the layer is gathered for the second time.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from paceline.parallel.buckets import view_like
from paceline.parallel.fsdp.gradient_message import GradientMessage
from paceline.parallel.fsdp.layout import LayerLayout, Run
from paceline.parallel.fsdp.sharding import LayerParameter, Sharding, as_dtensor
from paceline.parallel.fsdp.traffic import Traffic
from paceline.parallel.ranks.collectives import start_all_gather
from paceline.parallel.ranks.pending import Pending

Named: TypeAlias = tuple[str, nn.Parameter]


class ShardedLayer:
    """Parameters of one dtype that are gathered and freed together.

    Args:
        layout: Positions of the parameters.
        named: Names and parameters, in the order of the layout.
        sharding: The distribution of the parameters over ranks.
        compute_dtype: The dtype of full parameters and their gradients; None for their own.
        reduce_dtype: The dtype in which gradients are sent; None for that of the computation.
        is_plain: Whether the shards are plain tensors, for parameters that are not sharded.
        traffic: Records messages and waits.
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
            if tensor is not self.flat
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
                    shard=nn.Parameter(
                        local if spec is None else as_dtensor(local, spec), original.requires_grad
                    ),
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
        self._ready: torch.cuda.Event | None = None
        self._is_filled = False
        self._version = 0
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
    def is_stale(self) -> bool:
        """Whether the shards have changed since the layer was gathered."""
        return self._is_gathered and self._version != self.flat._version

    @torch.no_grad()
    def take_values(self, position: int, full: Tensor) -> None:
        """Copies this rank's rows of a full parameter's values into its shard."""
        parameter = self.parameters[position]
        rows = full if full.dim() else full.unsqueeze(0)
        own = parameter.piece.own_rows(rows, self.sharding.shard)
        parameter.local.copy_(own.view(parameter.local.shape))

    @torch.no_grad()
    def start_all_gather(self) -> None:
        """Starts the all-gather of the full parameters, unless the layer is gathered."""
        if self._is_gathered:
            return
        self._is_gathered = True
        self._version = self.flat._version
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

    @torch.no_grad()
    def wait(self) -> None:
        """Makes the current stream wait until the full parameters have arrived."""
        if self._ready is not None:
            self._ready.wait(torch.cuda.current_stream(self.layout.device))
        if self._is_filled or self._is_in_place:
            return
        self._is_filled = True
        self._receive()
        assert self._packed is not None
        _allocate(self._copies)
        with _unsafe_preserve_version_counter(self._copies):
            for run in self.layout.runs:
                if not run.is_one:
                    rows = self.layout.rows(run, self._alone, self._packed)
                    _copy_out(rows, run, self.layout, [p.full for p in self.parameters])
        self._packed = None
        if self.layout.device.type == "cuda":
            # Later waits in other streams must wait for the copies too.
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record(torch.cuda.current_stream(self.layout.device))

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
    tensor.untyped_storage().resize_(tensor.nbytes)


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
