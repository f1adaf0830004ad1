"""State of a fully sharded container's forward and backward passes, and their completion."""

import collections
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from paceline.parallel.fsdp.layer import ShardedLayer
from paceline.parallel.fsdp.layers import LayerUser
from paceline.parallel.ranks.rank_weight import RankWeight
from paceline.parallel.reducer.ownership import SynchronizationError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """One forward call of a user; uses are ordered by their ends, and backward reverses them."""

    user: LayerUser
    first: int
    """Index of the first use that ended inside it; its own index if there is none."""
    is_watched: bool
    """Whether a gradient of its output can arrive."""


class ForwardPass:
    """The modules that ran in a forward pass of the whole model.

    Args:
        synchronizes: Whether its gradients are averaged.
    """

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
        by_place: dict[int, list[ShardedLayer]] = defaultdict(list)
        for layer, place in lowest.items():
            by_place[place].append(layer)
        return by_place

    def unwatched(self) -> set[ShardedLayer]:
        """Returns the layers that ran without recording gradients, as in a checkpoint."""
        return {layer for use in self.uses if not use.is_watched for layer in use.user.layers}


@dataclasses.dataclass(kw_only=True)
class BackwardPass:
    """The progress of a backward pass."""

    completes: bool
    """Whether it completes gradients of parameters at all."""
    averages: bool
    """Whether its gradients are averaged when it ends, instead of staying local."""
    keeps_graph: bool
    """Whether a later pass differentiates its operations, which need the full parameters too."""
    weight: RankWeight | None = None
    """Weight of this rank's gradients; None if all ranks have equal weight."""
    forward: ForwardPass = dataclasses.field(default_factory=ForwardPass)
    follows: bool = False
    """Whether it has reached a use of a forward pass."""
    place: int = 0
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
        self.place = len(forward.uses)
        self.last_needed = forward.last_needed()
        self.unwatched |= forward.unwatched()


def require_all_sent(layers: Sequence[ShardedLayer]) -> None:
    """Raises if a gradient arrived after its layer's message was sent: it would be lost."""
    for layer in layers:
        for name in layer.gradients.unsent:
            raise SynchronizationError(
                f"parameter {name!r} got a gradient after its layer's gradients were sent; the "
                "loss may depend on a layer only through its outputs"
            )


@torch.no_grad()
def add_means(layers: Sequence[ShardedLayer], *, divide: bool) -> dict[str, bool]:
    """Adds the received sums or means to the shards' gradients.

    Returns whether each trained parameter had a gradient on this rank, by name.

    Args:
        layers: All layers that may have received gradients.
        divide: Whether to divide the sums by the number of ranks.
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
        layer.gradients.settle(total, divide=divide, some_rank_had=some_rank_had.get(layer))
    return arrived
