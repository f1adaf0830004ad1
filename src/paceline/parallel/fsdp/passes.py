"""What a fully sharded container knows of a forward and a backward pass, and how that ends."""

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
    """One forward of a user, in the order of their ends, which backward runs through in reverse."""

    user: LayerUser
    first: int
    """The first use that ended inside of it; its own place if none did."""
    is_watched: bool
    """Whether a gradient of its output can arrive."""


class ForwardPass:
    """What ran in a forward pass of the whole model.

    Args:
        synchronizes: Whether its gradients are to be averaged.
    """

    def __init__(self, *, synchronizes: bool = True) -> None:
        self.synchronizes = synchronizes
        self.started: list[LayerUser] = []
        self.uses: list[Use] = []

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

    def unwatched(self) -> set[ShardedLayer]:
        """Returns the layers that ran without a gradient being recorded, as in a checkpoint."""
        return {layer for use in self.uses if not use.is_watched for layer in use.user.layers}


@dataclasses.dataclass(kw_only=True)
class BackwardPass:
    """How far a backward pass has come."""

    completes: bool
    """Whether it completes gradients of parameters at all."""
    averages: bool
    """Whether these are averaged when it ends, and do not stay on this rank."""
    keeps_graph: bool
    """Whether a later pass goes through its own operations, which need the full parameters too."""
    weight: RankWeight | None = None
    """What this rank's gradients count for; None if all ranks count alike."""
    forward: ForwardPass = dataclasses.field(default_factory=ForwardPass)
    follows: bool = False
    """Whether it has met a forward pass."""
    place: int = 0
    last_needed: dict[int, list[ShardedLayer]] = dataclasses.field(default_factory=dict)
    in_flight: collections.deque[ShardedLayer] = dataclasses.field(
        default_factory=collections.deque
    )
    """Layers whose reduce-scatter was started and not waited for."""
    unwatched: set[ShardedLayer] = dataclasses.field(default_factory=set)
    """Layers that ran unwatched in a forward pass that it has met."""
    recomputed: dict[ShardedLayer, None] = dataclasses.field(default_factory=dict)
    """Layers that ran again inside of it, in their order."""

    def follow(self, forward: ForwardPass) -> None:
        """Begins at the end of a forward pass."""
        self.follows = True
        self.forward = forward
        self.place = len(forward.uses)
        self.last_needed = forward.last_needed()
        self.unwatched |= forward.unwatched()


def require_all_sent(layers: Sequence[ShardedLayer]) -> None:
    """Refuses a gradient that came when its layer's had been sent, and would be lost."""
    for layer in layers:
        for name in layer.gradients.unsent:
            raise SynchronizationError(
                f"parameter {name!r} got a gradient after its layer's gradients were sent; the "
                "loss may depend on a layer only through its outputs"
            )


@torch.no_grad()
def add_means(layers: Sequence[ShardedLayer], *, divide: bool) -> dict[str, bool]:
    """Adds what was received to the shards' gradients.

    Returns which of the trained parameters had a gradient on this rank, by name.

    Args:
        layers: All that may have received something.
        divide: Whether the sums are to be divided by the number of ranks.
    """
    arrived = {
        parameter.name: position in layer.gradients.arrived
        for layer in layers
        for position, parameter in enumerate(layer.parameters)
        if parameter.shard.requires_grad
    }
    totals = ((layer, layer.gradients.total()) for layer in layers)
    received = [(layer, total) for layer, total in totals if total is not None]
    # Only a rank that had no gradient for a parameter has to look whether others had one.
    missing = [(layer, total) for layer, total in received if layer.gradients.is_missing]
    numbers: Iterator[float] = iter(())
    if missing:
        flags = [layer.gradients.flags(total).double() for layer, total in missing]
        numbers = iter(torch.cat(flags).tolist())
    some_rank_had = {layer: [next(numbers) for _ in layer.parameters] for layer, _ in missing}
    for layer, total in received:
        layer.gradients.settle(total, divide=divide, some_rank_had=some_rank_had.get(layer))
    return arrived
