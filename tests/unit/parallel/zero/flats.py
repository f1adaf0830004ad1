"""Flat parameters of four small parameters, without any ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from paceline.parallel.buckets import plan_buckets, tensor_spec
from paceline.parallel.zero.flat_parameters import FlatParameters, Partition, shard_evenly

SIZES = (6, 3, 10, 5)


def make_flat(
    rank: int, num_ranks: int = 2, sizes: Sequence[int] = SIZES, **keywords: Any
) -> FlatParameters:
    """Flat parameters of ascending numbers, in the order of backward.

    With two ranks p3 is at 0 to 5, p2 at 8 to 18, p1 at 20 to 23 and p0 at 24 to 30 of 32 elements,
    of which each rank has 16.
    """
    parameters = [
        nn.Parameter(torch.arange(float(size)) + 100 * index) for index, size in enumerate(sizes)
    ]
    (plan,) = plan_buckets([tensor_spec(parameter) for parameter in parameters], None)
    keywords = {"partition": Partition.ELEMENTS, **keywords}
    names = [f"p{index}" for index in range(len(sizes))]
    return FlatParameters(shard_evenly(plan, num_ranks), parameters, names, rank=rank, **keywords)
