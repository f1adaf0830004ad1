"""Collectives under version-independent names, and collectives over plain numbers.

torch 2.13 renames the collectives over one tensor to ``*_single`` and deprecates the old names;
earlier versions have only the old names.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

all_gather_single: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


def reduce_numbers(
    numbers: Sequence[float],
    operation: dist.ReduceOp.RedOpType,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> list[float]:
    """Returns each number reduced over the ranks (sum, maximum or minimum), equal on all ranks."""
    tensor = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, operation, group=group)
    result: list[float] = tensor.tolist()
    return result


def mean_over_ranks(numbers: Sequence[float], device: torch.device) -> list[float]:
    """Returns each number's mean over all ranks, equal on all ranks."""
    totals = reduce_numbers(numbers, dist.ReduceOp.SUM, device)
    return [total / dist.get_world_size() for total in totals]
