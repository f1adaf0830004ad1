"""The end of a backward pass: the sums of all ranks become the shards' gradients."""

from collections.abc import Iterator, Sequence

import torch

from paceline.parallel.fsdp.layer import ShardedLayer
from paceline.parallel.reducer.synchronizer import SynchronizationError


def require_all_sent(layers: Sequence[ShardedLayer]) -> None:
    """Refuses a gradient that came when its layer's had been sent, and would be lost."""
    for layer in layers:
        for name in layer.gradients.unsent:
            raise SynchronizationError(
                f"parameter {name!r} got a gradient when its layer's had been sent; what enters "
                "the loss must come from what the layer returns"
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
