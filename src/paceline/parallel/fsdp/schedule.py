"""The schedule of gathering and freeing layers and of sending their gradients.

The order of the forward pass alone determines all sends, so all ranks launch the same messages in
the same order. At most two gradient messages have memory: before a layer's message is allocated,
the message of the layer two before it has been received and freed. The host never polls messages,
and waits for the device only if a trained parameter had no gradient on this rank.
"""

import collections
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge

from paceline.core.errors import UsageError
from paceline.parallel.buckets import RankWeight
from paceline.parallel.fsdp.layer import ShardedLayer
from paceline.parallel.fsdp.layers import LayerUser
from paceline.parallel.reducer import (
    OUTSIDE_BACKWARD,
    SynchronizationError,
    SyncState,
    current_pass,
    tensors_in,
    when_complete,
)
from paceline.parallel.traffic import Traffic


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """One forward call of a user; uses are ordered by their ends, and backward reverses them."""

    user: LayerUser
    first: int
    """Index of the first use that ended inside it; its own index if there is none."""
    is_watched: bool
    """Whether a gradient of its output can arrive."""


class ForwardPass:
    """The modules that ran in a forward pass of the whole model."""

    def __init__(self, *, synchronizes: bool = True) -> None:
        self.synchronizes = synchronizes
        self.started: list[LayerUser] = []
        self.uses: list[Use] = []

    def last_needed(self) -> dict[int, list[ShardedLayer]]:
        """Returns, for each use, the layers that backward no longer needs after it."""
        lowest: dict[ShardedLayer, int] = {}
        for use in self.uses:
            for layer in use.user.layers if use.is_watched else ():
                lowest[layer] = min(lowest.get(layer, use.first), use.first)
        by_index: dict[int, list[ShardedLayer]] = defaultdict(list)
        for layer, index in lowest.items():
            by_index[index].append(layer)
        return by_index

    def unwatched(self) -> set[ShardedLayer]:
        """Returns the layers that ran without recording gradients, as in a checkpoint."""
        return {layer for use in self.uses if not use.is_watched for layer in use.user.layers}


@dataclasses.dataclass(kw_only=True)
class BackwardPass:
    """The progress of a backward pass."""

    averages: bool
    """Whether its gradients are averaged when it ends, instead of staying local."""
    keeps_graph: bool
    """Whether a later pass differentiates its operations, which need the full parameters too."""
    completes: bool = False
    """Whether it completes gradients of parameters at all."""
    weight: RankWeight | None = None
    """Weight of this rank's gradients; None if all ranks have equal weight."""
    forward: ForwardPass = dataclasses.field(default_factory=ForwardPass)
    follows: bool = False
    """Whether it has reached a use of a forward pass."""
    index: int = 0
    last_needed: dict[int, list[ShardedLayer]] = dataclasses.field(default_factory=dict)
    in_flight: collections.deque[ShardedLayer] = dataclasses.field(
        default_factory=collections.deque
    )
    """Layers whose reduce-scatter is in flight."""
    unwatched: set[ShardedLayer] = dataclasses.field(default_factory=set)
    """Layers that ran unwatched in a forward pass that it has reached."""
    recomputed: dict[ShardedLayer, None] = dataclasses.field(default_factory=dict)
    """Layers that were recomputed inside it, in order."""

    def follow(self, forward: ForwardPass) -> None:
        """Moves to the end of a forward pass."""
        self.follows = True
        self.forward = forward
        self.index = len(forward.uses)
        self.last_needed = forward.last_needed()
        self.unwatched |= forward.unwatched()


class Schedule:
    """Gathers and frees layers as forward and backward reach them."""

    def __init__(
        self,
        users: Sequence[LayerUser],
        layers: Sequence[ShardedLayer],
        *,
        sync_state: SyncState,
        traffic: Traffic,
        layers_ahead: int,
        reshard_after_forward: bool,
        is_distributed: bool,
    ) -> None:
        self._users = users
        self._layers = layers
        self._sync_state = sync_state
        self._traffic = traffic
        self._layers_ahead = layers_ahead
        self._reshards = reshard_after_forward
        self._is_distributed = is_distributed
        self._forward = ForwardPass()
        self._known = ForwardPass()
        """The last complete forward pass."""
        self._is_as_known = True
        """Whether this pass has so far run the same modules as the last one."""
        self._in_forward = False
        self._backward: BackwardPass | None = None
        self._kept_for_graph = False
        self.arrived: dict[str, bool] = {}
        """Whether each trained parameter had a gradient here in the last synchronised pass."""
        self._accumulators: list[tuple[nn.Parameter, Node]] = []
        for user in users:
            _call_around_forward(user, self)
        for number, layer in enumerate(layers):
            for index, parameter in enumerate(layer.parameters):
                when_complete(parameter.full, self.take_gradient, number, index)
                self._accumulators.append(
                    (parameter.shard, get_gradient_edge(parameter.full.requires_grad_()).node)
                )

    def begin_forward(self) -> None:
        """Begins a forward pass of the whole model; gathers again what a graph still needs."""
        self._require_whole_pass()
        for user in self._users:
            user.require_shards()
        kept = [layer for layer in self._layers if self._kept_for_graph and layer.is_gathered]
        for layer in self._layers:
            layer.reset()
        # The shards may have changed since: no version of a tensor tells whether an optimizer has
        # changed a DTensor's rows.
        with torch.no_grad():
            for layer in kept:
                layer.start_all_gather()
            for layer in kept:
                layer.wait()
        self._traffic.records_times = self._sync_state.records_statistics
        self._traffic.begin_forward()
        self._sync_state.forward_synchronizes = self._sync_state.synchronize
        self._forward = ForwardPass(synchronizes=self._sync_state.synchronize)
        self._is_as_known = True
        self._in_forward = True

    def end_forward(self) -> None:
        """Ends a forward pass, and remembers its order for the next one."""
        self._known = self._forward
        self._in_forward = False

    def break_forward(self) -> None:
        """Restores the shards after an error in the forward pass."""
        for user in self._users:
            user.show_shards()
        if not (self._is_distributed and self._forward.started):
            self._in_forward = False

    def _require_whole_pass(self) -> None:
        """Raises if an error aborted the last pass of a distributed run.

        Other ranks may be at any point: their messages would be mistaken for different ones.
        """
        broken = "forward" if self._in_forward else "backward"
        if self._is_distributed and (self._in_forward or self._backward is not None):
            raise SynchronizationError(
                f"rank {dist.get_rank()}: the last {broken} pass was interrupted while layers "
                "were being gathered and gradients averaged, and the ranks no longer agree on "
                "what is sent; restart from a checkpoint"
            )
        if self._in_forward or self._backward is not None:
            for user in self._users:
                user.show_shards()
        self._in_forward, self._backward = False, None

    def before_forward(self, user: LayerUser) -> None:
        """Gathers the layers that a module needs, and starts the prefetch of the next ones."""
        if current_pass() == OUTSIDE_BACKWARD:
            started, known = self._forward.started, self._known.started
            index = len(started)
            self._is_as_known &= index < len(known) and known[index] is user
            started.append(user)
        else:  # Activation checkpointing recomputes a forward pass.
            recomputed = self._begin_backward(None).recomputed
            recomputed.update(dict.fromkeys(user.layers))
        with torch.no_grad():
            for layer in [*user.layers, *self._next_layers()]:
                layer.start_all_gather()
            for layer in user.layers:
                layer.wait()
                layer.num_users += 1
        user.show_full()

    def after_forward(
        self, user: LayerUser, first: int, sources: Sequence[Node | None], output: Any
    ) -> None:
        """Frees the layers of a module, and registers hooks on the gradients of its output.

        `first` uses had ended when it began; `sources` are the graph nodes that computed its
        inputs.
        """
        user.show_shards()
        for layer in user.layers:
            layer.num_users -= 1
        if current_pass() != OUTSIDE_BACKWARD:
            return  # The backward that follows needs the layers.
        tensors = list(tensors_in(output))
        _require_watchable(user, output, tensors)
        # The gradient of an input that is returned unchanged arrives after the layer's backward.
        computed = [tensor for tensor in tensors if tensor.grad_fn not in (None, *sources)]
        is_watched = torch.is_grad_enabled() and bool(computed)
        if is_watched:
            self._watch(computed)
        self._forward.uses.append(Use(user=user, first=first, is_watched=is_watched))
        is_last = len(self._forward.uses) == len(self._known.uses)
        stays = is_watched and user.module.training and (is_last or not self._reshards)
        if not (stays or self._kept_for_graph):
            kept = self._next_layers()
            for layer in user.layers:
                if layer not in kept:
                    layer.free()

    @property
    def num_uses(self) -> int:
        """Number of modules that have ended their forward in this pass."""
        return len(self._forward.uses)

    def take_gradient(self, number: int, index: int) -> None:
        """Moves a gradient that backward has completed into its layer's message."""
        backward = self._backward or self._begin_backward(None)
        if not backward.completes:  # A reentrant checkpoint completes gradients in its own pass.
            self._begin_completing(backward)
        self._layers[number].gradients.take(index, keep=not backward.averages)

    def _next_layers(self) -> list[ShardedLayer]:
        """Returns the layers of the next modules; empty if this pass differs from the last one."""
        if current_pass() != OUTSIDE_BACKWARD or not self._is_as_known:
            return []
        index = len(self._forward.started)
        following = self._known.started[index : index + self._layers_ahead]
        return [layer for user in following for layer in user.layers]

    def _watch(self, tensors: Sequence[Tensor]) -> None:
        """Registers hooks that begin a module's backward when a gradient of its output arrives."""
        forward, index = self._forward, len(self._forward.uses)
        for tensor in tensors:
            tensor.register_hook(  # type: ignore[no-untyped-call]
                lambda _gradient: self._before_backward(forward, index)
            )

    def _begin_backward(self, forward: ForwardPass | None) -> BackwardPass:
        if self._backward is None:
            synchronizes = (
                self._sync_state.forward_synchronizes if forward is None else forward.synchronizes
            )
            self._backward = BackwardPass(
                averages=self._sync_state.synchronize and synchronizes,
                keeps_graph=torch.is_grad_enabled() and forward is not None,
            )
            if self._completes_gradients():
                self._begin_completing(self._backward)
            Variable._execution_engine.queue_callback(self._end_backward)
        return self._backward

    def _begin_completing(self, backward: BackwardPass) -> None:
        """Notes that a pass completes gradients, which are averaged with this rank's weight."""
        backward.completes = True
        if backward.averages:
            self._traffic.records_times = self._sync_state.records_statistics
            self._traffic.begin_backward()
            num_ranks = self._layers[0].sharding.num_ranks
            backward.weight = self._sync_state.take_weight(num_ranks)

    def _completes_gradients(self) -> bool:
        """Returns whether the pass reaches parameters, not only inputs."""
        try:
            return any(
                torch._C._will_engine_execute_node(node)
                for shard, node in self._accumulators
                if shard.requires_grad
            )
        except RuntimeError:  # torch.autograd.grad, for full parameters
            return False

    def _before_backward(self, forward: ForwardPass, index: int) -> None:
        """Gathers the layers for the backward of a use, after all sends that come before it."""
        backward = self._begin_backward(forward)
        with torch.no_grad():
            if backward.forward is not forward:
                self._go_back(backward, -1)
                backward.follow(forward)
            self._go_back(backward, index)
            for layer in forward.uses[index].user.layers:
                layer.start_all_gather()
                layer.wait()

    def _go_back(self, backward: BackwardPass, target: int) -> None:
        """Steps back through the uses to a target, in the same order on all ranks."""
        uses = backward.forward.uses
        while backward.index > target:
            for layer in backward.last_needed.get(backward.index, ()):
                if not (backward.keeps_graph or self._kept_for_graph):
                    layer.free()
                self._send(backward, layer)
            backward.index -= 1
            for index in range(backward.index, backward.index - self._layers_ahead - 1, -1):
                if index >= 0 and uses[index].is_watched:
                    for layer in uses[index].user.layers:
                        layer.start_all_gather()

    def _send(self, backward: BackwardPass, layer: ShardedLayer) -> None:
        """Sends a layer's gradients, and receives those of the layer that was sent before it."""
        if not (backward.completes and backward.averages and layer.is_trained):
            return
        layer.gradients.send(backward.weight)
        backward.in_flight.append(layer)
        while len(backward.in_flight) > 1:
            backward.in_flight.popleft().gradients.receive()

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Sends the remaining gradients, and adds the means to the shards' gradients."""
        backward = self._backward
        assert backward is not None
        self._go_back(backward, -1)
        late = self._late_layers(backward)
        self._kept_for_graph = backward.keeps_graph or (
            self._kept_for_graph and not backward.completes
        )
        for layer in self._layers if not self._kept_for_graph else ():
            layer.free()
        if backward.completes and backward.averages:
            self._traffic.end_backward()
            for layer in late:
                self._send(backward, layer)
            while backward.in_flight:
                backward.in_flight.popleft().gradients.receive()
            _require_all_sent(self._layers)
            self.arrived = _add_means(self._layers, divide=backward.weight is None)
            self._traffic.complete()
        self._backward = None

    def _late_layers(self, backward: BackwardPass) -> list[ShardedLayer]:
        """Returns the layers whose gradients may have arrived out of order.

        The result depends only on which layers ran, not on which gradients arrived.
        """
        if self._kept_for_graph or not backward.follows:
            return list(self._layers)
        return [layer for layer in backward.recomputed if layer in backward.unwatched]


def _call_around_forward(user: LayerUser, schedule: Schedule) -> None:
    begun: list[tuple[int, list[Node | None]]] = []

    @_disable_dynamo
    def before(_module: nn.Module, arguments: Any, keywords: Any) -> None:
        sources = [tensor.grad_fn for tensor in tensors_in([arguments, keywords])]
        begun.append((schedule.num_uses, sources))
        schedule.before_forward(user)

    @_disable_dynamo
    def after(_module: nn.Module, _arguments: Any, output: Any) -> None:
        schedule.after_forward(user, *begun.pop(), output)

    # Prepended, because other hooks may use the parameters. Always called, to free after an error.
    user.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    user.module.register_forward_hook(after, always_call=True)


def _require_watchable(user: LayerUser, output: Any, tensors: Sequence[Tensor]) -> None:
    """Raises if an output needs the layer after it is freed: no tensor found, or a view of it."""
    if output is not None and not tensors and torch.is_grad_enabled():
        raise UsageError(
            f"layer {user.name!r} returns a {type(output).__name__}, in which no tensor was found "
            "whose gradient would tell that backward needs the layer; return tensors in tuples, "
            "lists, dictionaries or dataclasses"
        )
    storages = {pointer for layer in user.layers for pointer in layer.addresses()} - {0}
    for tensor in tensors:
        if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in storages:
            raise UsageError(
                f"layer {user.name!r} returns a view of its own parameters, whose memory is freed "
                "when its forward ends; return a copy: .clone()"
            )


def _require_all_sent(layers: Sequence[ShardedLayer]) -> None:
    """Raises if a gradient arrived after its layer's message was sent: it would be lost."""
    for layer in layers:
        for name in layer.gradients.unsent:
            raise SynchronizationError(
                f"parameter {name!r} got a gradient after its layer's gradients were sent; the "
                "loss may depend on a layer only through its outputs"
            )


def _add_means(layers: Sequence[ShardedLayer], *, divide: bool) -> dict[str, bool]:
    """Adds the received sums or means to the shards' gradients.

    Returns whether each trained parameter had a gradient on this rank, by name.
    """
    arrived = {
        parameter.name: position in layer.gradients.arrived
        for layer in layers
        for position, parameter in enumerate(layer.parameters)
        if parameter.shard.requires_grad
    }
    totals = ((layer, layer.gradients.total()) for layer in layers)
    received = [(layer, total) for layer, total in totals if total is not None]
    # Only a rank without a gradient for a parameter must check whether others had one.
    missing = [(layer, total) for layer, total in received if layer.gradients.is_missing]
    numbers: Iterator[float] = iter(())
    if missing:
        flags = [layer.gradients.flags(total).double() for layer, total in missing]
        numbers = iter(torch.cat(flags).tolist())
    some_rank_had = {layer: [next(numbers) for _ in layer.parameters] for layer, _ in missing}
    for layer, total in received:
        layer.gradients.add_means(total, divide=divide, some_rank_had=some_rank_had.get(layer))
    return arrived
