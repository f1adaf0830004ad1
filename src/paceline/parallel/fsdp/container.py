"""Parameters, gradients and optimizer state sharded over ranks (ZeRO-3); one layer full at a time.

Phases of a training step on every rank:

1. Before a layer's forward, its parameters are all-gathered, and those of the next two layers are
   prefetched. After it, they are freed; the last layer's stay, as backward needs them first. Which
   layers come next is known from the forward pass before.
2. The gradient of a layer's output arrives: its parameters are all-gathered again, and those of the
   two layers before it are prefetched.
3. Backward has passed a layer: its parameters are freed, and its gradients are reduce-scattered.
   Sums that have arrived are taken in at the same time.
4. Backward is over: the remaining layers' gradients are reduce-scattered, the ranks tell each other
   in one small message which parameters had any, and the means are added to the shards' gradients.

All ranks must run the same layers in the same order, and backward equally often. What is sent in
backward follows the order of the forward pass, whether the loss depends on a layer or not, so that
ranks whose losses depend on different parameters still meet in the same messages. A gradient that
comes when its layer's have been sent goes with phase 4.

A layer is an element of an `nn.ModuleList`; outside of these, each module that has parameters of
its own. Its parameters are there in full only while its own forward runs: other modules must call
it instead of reading them, and what enters the loss must come from what it returns. A reentrant
checkpoint frees its layers only when backward is over.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from paceline.core.errors import UsageError
from paceline.parallel.fsdp.layer import LayerUser, ShardedLayer, shard_module
from paceline.parallel.ranks.collectives import reduce_numbers
from paceline.parallel.reducer.backward_pass import OUTSIDE_BACKWARD, current_pass
from paceline.parallel.reducer.hooks import when_complete
from paceline.parallel.reducer.module_checks import (
    is_compiled,
    require_supported,
    resolve_group,
    tensors_in,
)
from paceline.parallel.reducer.same_model import broadcast_tensors, require_same_model
from paceline.parallel.reducer.settings import GroupReference

_LAYERS_AHEAD = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Use:
    """One forward of a user, in the order of their ends, which backward runs through in reverse."""

    user: LayerUser
    first: int
    """The first use that ended inside of it; its own place if none did."""
    is_watched: bool
    """Whether a gradient of its output can arrive."""


class _ForwardPass:
    """What ran in a forward pass of the whole model."""

    def __init__(self) -> None:
        self.started: list[LayerUser] = []
        self.uses: list[_Use] = []

    def last_needed(self) -> dict[int, list[ShardedLayer]]:
        """Returns, for each place, the layers that backward does not need once it has left it."""
        lowest: dict[ShardedLayer, int] = {}
        for use in self.uses:
            for layer in use.user.layers if use.is_watched else ():
                lowest[layer] = min(lowest.get(layer, use.first), use.first)
        by_place: dict[int, list[ShardedLayer]] = defaultdict(list)
        for layer, place in lowest.items():
            by_place[place].append(layer)
        return by_place


class _BackwardPass:
    """How far a backward pass has come."""

    def __init__(self) -> None:
        self.sent: list[ShardedLayer] = []
        """Layers whose reduce-scatter may be in flight."""
        self.follow(_ForwardPass())

    def follow(self, forward: _ForwardPass) -> None:
        """Begins at the end of a forward pass."""
        self.forward = forward
        self.place = len(forward.uses)
        self.last_needed = forward.last_needed()


class _Schedule:
    """Gathers and frees layers as forward and backward reach them."""

    def __init__(
        self, users: Sequence[LayerUser], layers: Sequence[ShardedLayer], group: GroupReference
    ) -> None:
        self._users = users
        self._layers = layers
        self._group = group
        self._forward = _ForwardPass()
        self._known = _ForwardPass()
        """The last complete forward pass."""
        self._backward: _BackwardPass | None = None
        for user in users:
            _call_around_forward(user, self)
        for number, layer in enumerate(layers):
            for index, parameter in enumerate(layer.parameters):
                tell = functools.partial(_Schedule.take_gradient, number=number, index=index)
                when_complete(parameter.full, self, tell)

    def begin_forward(self) -> None:
        """Starts a forward pass of the whole model from shards alone."""
        self._backward = None
        for user in self._users:
            user.show_shards()
        for layer in self._layers:
            layer.reset()
        self._forward = _ForwardPass()

    def end_forward(self) -> None:
        """Keeps the order for the next pass."""
        self._known = self._forward
        self._forward = _ForwardPass()

    def before_forward(self, user: LayerUser) -> None:
        """Gathers what a module needs, and starts what is needed next."""
        if current_pass() == OUTSIDE_BACKWARD:
            self._forward.started.append(user)
        else:
            self._begin_backward()  # A checkpoint computes a forward pass a second time.
        for layer in [*user.layers, *self._next_layers()]:
            layer.start_all_gather()
        for layer in user.layers:
            layer.wait()
            layer.num_users += 1
        user.show_full()

    def after_forward(
        self, user: LayerUser, first: int, sources: Sequence[Node | None], output: Any
    ) -> None:
        """Frees what a module needed, and watches for the gradients of its output.

        Args:
            user: The module.
            first: How many uses had ended when it began.
            sources: What computed its inputs.
            output: What it returned.
        """
        user.show_shards()
        for layer in user.layers:
            layer.num_users -= 1
        if current_pass() != OUTSIDE_BACKWARD:
            return  # The backward that follows needs them.
        tensors = list(tensors_in(output))
        _require_watchable(user, output, tensors)
        # The gradient of what is only handed on arrives when the layer's backward is long over.
        computed = [tensor for tensor in tensors if tensor.grad_fn not in (None, *sources)]
        is_watched = torch.is_grad_enabled() and bool(computed)
        if is_watched:
            self._watch(computed)
        self._forward.uses.append(_Use(user=user, first=first, is_watched=is_watched))
        is_last = len(self._forward.uses) == len(self._known.uses)
        if not (is_last and is_watched and user.module.training):
            kept = self._next_layers()
            for layer in user.layers:
                if layer not in kept:
                    layer.free()

    @property
    def num_uses(self) -> int:
        """How many modules have ended their forward in this pass."""
        return len(self._forward.uses)

    @torch.no_grad()
    def take_gradient(self, number: int, index: int) -> None:
        """Takes in a gradient that a backward pass has completed."""
        self._begin_backward()
        self._layers[number].take_gradient(index)

    def _next_layers(self) -> list[ShardedLayer]:
        """Returns what the modules need that run next, if this pass goes like the one before."""
        so_far, known = self._forward.started, self._known.started
        if current_pass() != OUTSIDE_BACKWARD or known[: len(so_far)] != so_far:
            return []
        following = known[len(so_far) : len(so_far) + _LAYERS_AHEAD]
        return [layer for user in following for layer in user.layers]

    def _watch(self, tensors: Sequence[Tensor]) -> None:
        """Lets the gradients of a module's output begin its backward."""
        forward, place = self._forward, len(self._forward.uses)
        for tensor in tensors:
            tensor.register_hook(  # type: ignore[no-untyped-call]
                lambda _gradient: self._before_backward(forward, place)
            )

    def _begin_backward(self) -> _BackwardPass:
        if self._backward is None:
            self._backward = _BackwardPass()
            Variable._execution_engine.queue_callback(self._end_backward)
        return self._backward

    def _before_backward(self, forward: _ForwardPass, place: int) -> None:
        """Gathers what the backward of a use needs, after all that is due before it."""
        backward = self._begin_backward()
        if backward.forward is not forward:
            self._go_back(backward, -1)
            backward.follow(forward)
        self._go_back(backward, place)
        for layer in forward.uses[place].user.layers:
            layer.start_all_gather()
            layer.wait()

    def _go_back(self, backward: _BackwardPass, target: int) -> None:
        """Leaves one use after another, the same on all ranks, until a target is reached."""
        uses = backward.forward.uses
        while backward.place > target:
            for layer in backward.last_needed[backward.place]:
                layer.free()
                layer.start_reduce_scatter()
                backward.sent.append(layer)
            backward.sent = [layer for layer in backward.sent if not layer.receive_arrived()]
            backward.place -= 1
            for place in range(backward.place, backward.place - _LAYERS_AHEAD - 1, -1):
                if place >= 0 and uses[place].is_watched:
                    for layer in uses[place].user.layers:
                        layer.start_all_gather()

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Sends what is left, and adds the means to the shards' gradients."""
        backward = self._backward
        assert backward is not None
        self._go_back(backward, -1)
        self._backward = None
        numbers = [
            *(p.has_gradient for layer in self._layers for p in layer.parameters),
            *(layer.has_message for layer in self._layers),
        ]
        group = self._group.get()
        device = self._layers[0].buffer.device
        num_ranks = iter(reduce_numbers(numbers, dist.ReduceOp.SUM, device, group))
        with_gradient = [[next(num_ranks) for _ in layer.parameters] for layer in self._layers]
        for layer in self._layers:
            layer.free()
            # Gradients that came when their layer's had been sent, on any rank.
            if next(num_ranks):
                layer.start_reduce_scatter()
        for layer, numbers_of_layer in zip(self._layers, with_gradient, strict=True):
            layer.receive()
            layer.settle(numbers_of_layer)


class FullyShardedDataParallel(nn.Module):
    """A module whose parameters, gradients and optimizer state are sharded over ranks (ZeRO-3).

    Its parameters are shards: flat tensors with this rank's elements of each, for any optimizer
    that treats each element by itself. Make the optimizer after the container.

    Args:
        module: The model, on its final device and in its final dtype. All ranks get the values
            that the group's first rank has, frozen parameters and buffers included.
        compute_dtype: What full parameters, gradients in flight and floating-point inputs are in;
            by default parameters and inputs as they are. Shards, their gradients and their
            sums stay in the parameters' own dtype.
        process_group: The ranks to shard over, as a group or a mesh of one dimension; all by
            default.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        compute_dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        group = resolve_group(process_group)
        device = require_supported(module)
        _require_shardable(module, compute_dtype)
        self.module = module
        self._compute_dtype = compute_dtype
        self._group = GroupReference(group)
        require_same_model(module, f"compute_dtype {compute_dtype}", group, device)
        broadcast_tensors([*module.parameters(), *module.buffers()], group)
        self._names = [name for name, _ in module.named_parameters()]
        self._layers, users = shard_module(module, compute_dtype, self._group)
        self._schedule = _Schedule(users, self._layers, self._group)
        self._schedule.begin_forward()

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that hold the shards."""
        return self._group.get()

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Runs the module.

        Args:
            arguments: As the module takes them.
            keywords: As the module takes them.
        """
        if self._compute_dtype is not None:
            arguments, keywords = tree_map_only(
                Tensor, functools.partial(_cast, dtype=self._compute_dtype), (arguments, keywords)
            )
        if current_pass() != OUTSIDE_BACKWARD:
            return self.module(*arguments, **keywords)
        self._schedule.begin_forward()
        try:
            output = self.module(*arguments, **keywords)
        except BaseException:
            self._schedule.begin_forward()
            raise
        self._schedule.end_forward()
        return output

    def finish_gradient_synchronization(self) -> None:
        """Does nothing: gradients are averaged when backward returns."""

    def gather_full_params(self) -> dict[str, Tensor]:
        """Returns all parameters in full, by the inner module's names; all ranks must call it."""
        gathered: dict[str, Tensor] = {}
        for layer in self._layers:
            gathered |= layer.gather_full()
        return {name: gathered[name] for name in self._names}

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(
            "a fully sharded container cannot be copied or pickled; save gather_full_params()"
        )


def _call_around_forward(user: LayerUser, schedule: _Schedule) -> None:
    begun: list[tuple[int, list[Node | None]]] = []

    def before(_module: nn.Module, arguments: Any, keywords: Any) -> None:
        sources = [tensor.grad_fn for tensor in tensors_in([arguments, keywords])]
        begun.append((schedule.num_uses, sources))
        schedule.before_forward(user)

    def after(_module: nn.Module, _arguments: Any, output: Any) -> None:
        schedule.after_forward(user, *begun.pop(), output)

    # Other hooks may use the parameters too; after an error there is also something to free.
    user.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    user.module.register_forward_hook(after, always_call=True)


def _require_shardable(module: nn.Module, compute_dtype: torch.dtype | None) -> None:
    """Refuses what cannot be sharded, by name."""
    if compute_dtype is not None and not compute_dtype.is_floating_point:
        raise UsageError(f"compute_dtype must be a floating-point dtype, got {compute_dtype}")
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point():
            raise UsageError(
                f"parameter {name!r} is {parameter.dtype}; only real floating-point parameters can "
                "be fully sharded: use another container, or make it a buffer"
            )
    for name, part in module.named_modules():
        if is_compiled(part):
            raise UsageError(
                f"module {name or type(part).__name__!r} is compiled, which would keep freed "
                "parameters in its graph; wrap it uncompiled"
            )


def _require_watchable(user: LayerUser, output: Any, tensors: Sequence[Tensor]) -> None:
    """Refuses an output that would need the layer when it is freed and nobody could tell."""
    if output is not None and not tensors and torch.is_grad_enabled():
        raise UsageError(
            f"layer {user.name!r} returns a {type(output).__name__}, in which no tensor was found "
            "whose gradient would tell that backward needs the layer; return tensors in tuples, "
            "lists, dictionaries or dataclasses"
        )
    buffers = {layer.buffer.untyped_storage().data_ptr() for layer in user.layers}
    for tensor in tensors:
        if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in buffers - {0}:
            raise UsageError(
                f"layer {user.name!r} returns a view of its own parameters, whose memory is freed "
                "when its forward ends; return a copy: .clone()"
            )


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
