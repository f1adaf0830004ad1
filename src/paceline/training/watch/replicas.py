"""Checks that all ranks have bitwise identical weights and optimizer state.

Usually this costs one read of the state and one all-reduce of two numbers, at any world size. Only
if ranks differ do they exchange more, to find out which rank and which tensor.
"""

import collections

import torch
import torch.distributed as dist

from paceline.parallel.ranks.collectives import all_gather_single
from paceline.training.build import Trainee
from paceline.training.watch.digest import combined, digests
from paceline.training.watch.held import held_tensors

_MOST_RANKS = 4
"""Maximum number of ranks that a message names."""


def compare_replicas(trainee: Trainee, device: torch.device) -> str | None:
    """Returns which ranks differ from the others, and in which tensor; None if all agree.

    All ranks must call it, and get the same answer.

    Args:
        trainee: The model and its optimizers.
        device: Device to compute on.
    """
    held = [each for each in held_tensors(trainee) if each.is_replicated]
    hashes = digests([each.values for each in held], device)
    total = combined(hashes)
    # All are equal if maximum and minimum are. ~x is -x - 1, which cannot overflow.
    extremes = torch.stack([total, ~total])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    largest, inverse_of_smallest = extremes.tolist()
    if largest == ~inverse_of_smallest:
        return None
    totals = _from_each_rank(total)
    most_held, number = collections.Counter(totals).most_common(1)[0]
    reference = totals.index(most_held)
    theirs = hashes.clone()
    dist.broadcast(theirs, reference)
    differing = (hashes != theirs).nonzero().flatten()
    first = differing[0] if len(differing) else torch.tensor(-1, device=device)
    places = _from_each_rank(first)
    names = [each.name for each in held]
    others = [rank for rank, own in enumerate(totals) if own != most_held]
    if 2 * number > len(totals):
        return "; ".join(
            f"rank {rank} differs from {number} of {len(totals)} ranks, first in "
            f"{names[places[rank]]}"
            for rank in others[:_MOST_RANKS]
        )
    return (
        f"ranks {reference} and {others[0]} differ, first in {names[places[others[0]]]}, and "
        "without a majority it is not known which one is corrupted; set watch.hash_at_rest to "
        "find out"
    )


def _from_each_rank(number: torch.Tensor) -> list[int]:
    gathered = number.new_empty(dist.get_world_size())
    all_gather_single(gathered, number.view(1))
    values: list[int] = gathered.tolist()
    return values
