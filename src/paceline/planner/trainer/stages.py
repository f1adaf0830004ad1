"""Largest loads of the trainer's pipeline stages, for arrays of layouts."""

import functools
from typing import Any, NamedTuple

import numpy as np

from paceline.accounting.parameters import count_parameters
from paceline.accounting.stages import divide_into_stages
from paceline.core.specs import ModelShape


class StageLoads(NamedTuple):
    """Largest loads over the ranks of each pipeline, as arrays shaped like the layouts'."""

    parameters: Any
    """Parameters of the rank with the most, summed over tensor ranks."""
    in_flight: Any
    """Most blocks times micro-batches that a rank keeps. r ranks before the last, a rank keeps
    r + 1 micro-batches."""
    last: Any
    """Number of blocks of the last rank."""


def stage_loads(
    shape: ModelShape, context_length: int, pipeline: Any, interleave: Any
) -> StageLoads:
    """Returns the largest loads of the trainer's stages.

    A layout with more stages than the model has blocks cannot run. Its ranks and stages per rank
    are reduced until every stage has a block.

    Args:
        shape: The model's dimensions.
        context_length: Tokens per sequence.
        pipeline: Ranks in each pipeline.
        interleave: Stages per rank.
    """
    ranks, parts = np.broadcast_arrays(pipeline, interleave)
    pairs, places = np.unique(np.stack([ranks.ravel(), parts.ravel()]), axis=1, return_inverse=True)
    loads = np.array([_loads(shape, context_length, *map(int, pair)) for pair in pairs.T])
    return StageLoads(*(column[places].reshape(ranks.shape) for column in loads.T))


@functools.lru_cache(maxsize=4096)
def _loads(
    shape: ModelShape, context_length: int, num_ranks: int, interleave: int
) -> tuple[float, float, float]:
    num_ranks = min(num_ranks, shape.num_layers)
    interleave = min(interleave, shape.num_layers // num_ranks)
    stages = divide_into_stages(shape, context_length, num_ranks, interleave)
    blocks = [sum(map(len, stages[rank::num_ranks])) for rank in range(num_ranks)]
    counted = count_parameters(shape)
    first, head = counted.embedding + counted.positions, counted.head
    block = (counted.total - first - head) / shape.num_layers
    parameters = [number * block for number in blocks]
    parameters[0] += first
    # The last rank of a pipeline has its own copy of a tied embedding.
    is_copied = shape.tied_embeddings and num_ranks > 1
    parameters[-1] += counted.embedding if is_copied else head
    in_flight = max(number * (num_ranks - rank) for rank, number in enumerate(blocks))
    return max(parameters), float(in_flight), float(blocks[-1])
