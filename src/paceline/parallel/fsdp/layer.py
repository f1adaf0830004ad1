"""One layer of a fully sharded model: shards at rest, full parameters while it is used.

A layer whose parameters have several dtypes is one `ShardedLayer` per dtype.

Parameters of one dtype lie one behind another in a flat buffer, which is cut into one equal shard
per rank. At rest a rank holds its shards alone: of each parameter the elements in its shard, which
may be none. The buffer, of which the full parameters are views, has memory only while the layer is
gathered. Its storage stays the same object, so that what autograd has saved for backward
finds its values again when the layer is gathered for the second time.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from paceline.core.errors import UsageError
from paceline.core.ranges import WAIT
from paceline.kernels.named_range import named_range
from paceline.parallel.buckets import (
    BucketPlan,
    plan_buckets,
    reducible_gradient,
    tensor_spec,
    view_like,
)
from paceline.parallel.partition import shard_evenly
from paceline.parallel.ranks.pending import Pending
from paceline.parallel.ranks.reduce_scatter import (
    ReduceScatter,
    start_all_gather,
    start_reduce_scatter,
)
from paceline.parallel.reducer.settings import GroupReference


@dataclasses.dataclass(eq=False, kw_only=True)
class LayerParameter:
    """One parameter in its two forms."""

    name: str
    """In the inner module."""
    shard: nn.Parameter
    """This rank's elements, flat, in the order of the parameter's memory."""
    full: nn.Parameter
    """All elements, while the layer is gathered."""
    has_gradient: bool = False
    """Whether the backward pass that is going on has completed a gradient on this rank."""


class ShardedLayer:
    """Parameters of one dtype that are gathered and freed together.

    Args:
        plan: Where they lie in the flat buffer.
        named: The names and parameters that were planned, with the values that they begin with.
        compute_dtype: What full parameters and their gradients are in; None for their own.
        group: The ranks that hold the shards.
    """

    @torch.no_grad()
    def __init__(
        self,
        plan: BucketPlan,
        named: Sequence[tuple[str, nn.Parameter]],
        *,
        compute_dtype: torch.dtype | None,
        group: GroupReference,
    ) -> None:
        self._group = group
        self._layout = layout = shard_evenly(plan, dist.get_world_size(group.get()))
        rank = dist.get_rank(group.get())
        self._begin, end = layout.borders[rank], layout.borders[rank + 1]
        self._shard_length = end - self._begin
        self.buffer = torch.empty(
            layout.num_elements, dtype=compute_dtype or layout.dtype, device=layout.device
        )
        """What the full parameters are views of."""
        self.parameters: list[LayerParameter] = []
        self._pieces: list[slice] = []
        values = torch.empty(layout.num_elements, dtype=layout.dtype, device=layout.device)
        owned = {piece.tensor: piece for piece in layout.slices(rank)}
        for slot in layout.slots:
            name, original = named[slot.tensor]
            view_like(original, slot.piece_of(values)).copy_(original)
            start, length = self._begin, 0
            if (piece := owned.get(slot.tensor)) is not None:
                start, length = piece.offset, piece.end - piece.start
            self._pieces.append(slice(start, start + length))
            shard = nn.Parameter(values[self._pieces[-1]].clone(), original.requires_grad)
            full = nn.Parameter(view_like(original, slot.piece_of(self.buffer)))
            self.parameters.append(LayerParameter(name=name, shard=shard, full=full))
        self.num_users = 0
        """How many forward passes that need the full parameters are going on."""
        self._num_bytes = self.buffer.nbytes
        self._all_gather: Pending | None = None
        self._message: Tensor | None = None
        self._reduce_scatters: list[ReduceScatter] = []
        self._total: Tensor | None = None
        self._is_gathered = True
        self.free()

    @property
    def has_message(self) -> bool:
        """Whether there are gradients that were not sent."""
        return self._message is not None

    @torch.no_grad()
    def start_all_gather(self) -> None:
        """Starts to get the full parameters from all ranks, unless they are there."""
        if self._is_gathered:
            return
        self._is_gathered = True
        self.buffer.untyped_storage().resize_(self._num_bytes)
        # What autograd has saved is to be taken for unchanged: it gets the same values again.
        with _unsafe_preserve_version_counter(self.buffer):
            self._fill(self.buffer)
            self._all_gather = start_all_gather(
                self.buffer, self._layout.borders, self._group.get()
            )
        for parameter in self.parameters:
            parameter.full.requires_grad_(parameter.shard.requires_grad)

    def wait(self) -> None:
        """Waits until the full parameters are there."""
        if self._all_gather is not None:
            with named_range(WAIT):
                self._all_gather.wait()
            self._all_gather = None

    def free(self) -> None:
        """Gives back the memory of the full parameters, unless a forward pass uses them."""
        if self._is_gathered and self.num_users == 0:
            self._is_gathered = False
            self.wait()
            self.buffer.untyped_storage().resize_(0)

    @torch.no_grad()
    def take_gradient(self, position: int) -> None:
        """Moves a complete gradient of one of the parameters into the next message."""
        parameter, slot = self.parameters[position], self._layout.slots[position]
        gradient = reducible_gradient(
            parameter.full, parameter.name, self.buffer.dtype, self.buffer.device
        )
        parameter.full.grad = None
        if self._message is None:
            self._message = torch.zeros_like(self.buffer)
        parameter.has_gradient = True
        # A second gradient in one pass comes from a checkpoint that runs a pass of its own.
        view_like(parameter.full, slot.piece_of(self._message)).add_(gradient)

    def start_reduce_scatter(self) -> None:
        """Sends each rank its shard of the gradients, with zeros for what is missing."""
        message, self._message = self._message, None
        is_trained = any(parameter.shard.requires_grad for parameter in self.parameters)
        if not (is_trained and self._shard_length):
            return
        if message is None:
            message = torch.zeros_like(self.buffer)
        self._reduce_scatters.append(start_reduce_scatter(message, self._group.get()))

    def receive_arrived(self) -> bool:
        """Takes in the sums if all have arrived; False if not."""
        has_arrived = all(one.is_completed() for one in self._reduce_scatters)
        if has_arrived:
            self.receive()
        return has_arrived

    @torch.no_grad()
    def receive(self) -> None:
        """Waits for the sums that are in flight, and takes them in."""
        reduce_scatters, self._reduce_scatters = self._reduce_scatters, []
        for reduce_scatter in reduce_scatters:
            with named_range(WAIT):
                reduce_scatter.wait()
            is_first = self._total is None
            if self._total is None:
                self._total = self._new_shard()
            reduce_scatter.add_to(self._total, overwrite=is_first)

    @torch.no_grad()
    def settle(self, num_ranks_with_gradient: Sequence[float]) -> None:
        """Adds the means to the shards' gradients.

        Args:
            num_ranks_with_gradient: For each parameter; where it is zero, the shard gets none.
        """
        total, self._total = self._total, None
        if total is None:
            total = self._new_shard()
        total.div_(dist.get_world_size(self._group.get()))
        for parameter, piece, num_ranks in zip(
            self.parameters, self._pieces, num_ranks_with_gradient, strict=True
        ):
            parameter.has_gradient = False
            if not num_ranks:
                continue
            mean = total[piece.start - self._begin : piece.stop - self._begin]
            if parameter.shard.grad is None:
                parameter.shard.grad = mean
            else:
                parameter.shard.grad.add_(mean)

    @torch.no_grad()
    def reset(self) -> None:
        """Goes back to shards alone, whatever went on; gradients in flight are dropped."""
        self.num_users = 0
        self.free()
        self.receive()
        self._message = self._total = None
        for parameter in self.parameters:
            parameter.full.grad = None
            parameter.has_gradient = False

    @torch.no_grad()
    def gather_full(self) -> dict[str, Tensor]:
        """Returns all parameters in full and in their own dtype; all ranks must call it."""
        layout = self._layout
        flat = torch.empty(layout.num_elements, dtype=layout.dtype, device=layout.device)
        self._fill(flat)
        start_all_gather(flat, layout.borders, self._group.get()).wait()
        return {
            parameter.name: view_like(parameter.full, slot.piece_of(flat)).clone()
            for parameter, slot in zip(self.parameters, layout.slots, strict=True)
        }

    def _new_shard(self) -> Tensor:
        return torch.zeros(self._shard_length, dtype=self._layout.dtype, device=self._layout.device)

    def _fill(self, flat: Tensor) -> None:
        """Copies this rank's shards to their places."""
        layout = self._layout
        for parameter, piece in zip(self.parameters, self._pieces, strict=True):
            shard = parameter.shard
            if shard.dtype != layout.dtype or shard.device != layout.device:
                raise UsageError(
                    f"parameter {parameter.name!r} was converted to {shard.dtype} on "
                    f"{shard.device} after its container was made for {layout.dtype} on "
                    f"{layout.device}; convert it before"
                )
            flat[piece].copy_(shard)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LayerUser:
    """A module that needs full parameters while its forward runs."""

    name: str
    module: nn.Module
    layers: list[ShardedLayer]
    """Its own, and those of parameters that it shares with modules before it."""
    places: list[tuple[nn.Module, str, LayerParameter]]
    """Where its parameters are attributes."""

    def show_full(self) -> None:
        """Makes the full parameters the modules' own."""
        for module, name, parameter in self.places:
            setattr(module, name, parameter.full)

    def show_shards(self) -> None:
        """Makes the shards the modules' own."""
        for module, name, parameter in self.places:
            setattr(module, name, parameter.shard)


def shard_module(
    module: nn.Module, compute_dtype: torch.dtype | None, group: GroupReference
) -> tuple[list[ShardedLayer], list[LayerUser]]:
    """Divides a module into layers, and tells who uses which of them."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    homes: dict[nn.Parameter, tuple[ShardedLayer, LayerParameter]] = {}
    layers: list[ShardedLayer] = []
    users: list[LayerUser] = []
    for path, part, scope in _find_users(module, "", set(), is_element=False):
        occurrences = [
            (owner, attribute, parameter)
            for owner in scope
            for attribute, parameter in owner._parameters.items()
            if parameter is not None
        ]
        # In a dictionary, as a parameter may occur more than once.
        new = {p: (names[p], p) for _, _, p in occurrences if p not in homes}
        named = list(new.values())
        for plan in plan_buckets([tensor_spec(*one) for one in named], cap_bytes=None):
            layer = ShardedLayer(plan, named, compute_dtype=compute_dtype, group=group)
            layers.append(layer)
            for slot, parameter in zip(plan.slots, layer.parameters, strict=True):
                homes[named[slot.tensor][1]] = (layer, parameter)
        users.append(
            LayerUser(
                name=path,
                module=part,
                layers=list(dict.fromkeys(homes[p][0] for _, _, p in occurrences)),
                places=[(owner, attribute, homes[p][1]) for owner, attribute, p in occurrences],
            )
        )
    return layers, users


def _find_users(
    module: nn.Module, path: str, seen: set[nn.Module], *, is_element: bool
) -> Iterator[tuple[str, nn.Module, list[nn.Module]]]:
    """Yields the modules whose forward needs full parameters, and where these are found."""
    if module in seen:
        return
    seen.add(module)
    has_forward = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if is_element and has_forward:
        if any(True for _ in module.parameters()):
            yield path, module, list(module.modules())
        return
    # Lists of parameters are never called; whoever has one reads it in its own forward.
    lists = [c for c in module.children() if isinstance(c, (nn.ParameterList, nn.ParameterDict))]
    scope = [module, *lists]
    if any(True for part in scope for _ in part.parameters(recurse=False)):
        yield path, module, scope
    for name, child in module.named_children():
        if child not in lists:
            yield from _find_users(
                child,
                f"{path}.{name}" if path else name,
                seen,
                is_element=isinstance(module, nn.ModuleList),
            )
