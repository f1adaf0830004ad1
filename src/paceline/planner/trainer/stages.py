"""The trainer's stages of a pipeline, for arrays of layouts: what the fullest ones have."""

import functools
from typing import Any, NamedTuple

import numpy as np

from paceline.accounting.parameters import count_parameters
from paceline.accounting.stages import divide_into_stages
from paceline.core.specs import ModelShape


class StageLoads(NamedTuple):
    """What ranks of a pipeline have at most, arrays like the layouts'."""

    parameters: Any
    """Of the rank that has most, all tensor ranks together."""
    in_flight: Any
    """Most blocks times micro-batches that a rank keeps: r ranks from the end, it has r + 1."""
    last: Any
    """Blocks of the last rank."""


def stage_loads(
    shape: ModelShape, context_length: int, pipeline: Any, interleave: Any
) -> StageLoads:
    """Returns the loads of the trainer's stages.

    Where a model has too few blocks, which does not run, they are those of a stage per block.

    Args:
        shape: The model's dimensions.
        context_length: Tokens of a sequence.
        pipeline: Ranks of each pipeline.
        interleave: Stages on each of its ranks.
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
    # A pipeline's last rank has its own copy of a weight that is tied.
    is_copied = shape.tied_embeddings and num_ranks > 1
    parameters[-1] += counted.embedding if is_copied else head
    in_flight = max(number * (num_ranks - rank) for rank, number in enumerate(blocks))
    return max(parameters), float(in_flight), float(blocks[-1])
