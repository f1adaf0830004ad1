"""The total norm of all gradients of a layout, and clipping to it.

Every rank sums the squares of its gradients, each divided by its number of copies: the ranks of the
stage over which the parameter is not sharded. One all-reduce over all ranks then gives the square
of the norm. It is bitwise equal on all ranks, which keeps copies of a parameter equal. (torch's own
norm of DTensors reduces each axis separately, and warns that ranks may round differently.)
"""

import math
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.parallel.buckets import local_tensor
from paceline.parallel.mesh.groups import MeshGroups
from paceline.parallel.mesh.tensor import complete_gradients


def clip_grad_norm(
    model: nn.Module, groups: MeshGroups, max_norm: float, uncounted: Collection[nn.Parameter] = ()
) -> Tensor:
    """Clips gradients to a total norm; returns the norm before clipping. All ranks must call it.

    Args:
        model: This rank's stages.
        groups: The groups of the layout.
        max_norm: Largest total norm that is not scaled down.
        uncounted: Parameters that another stage counts, such as the copy of a tied embedding.
    """
    complete_gradients(model)
    ignored = {id(parameter) for parameter in uncounted}
    stage_ranks = groups.layout.world_size // groups.layout.pipeline
    total = torch.zeros((), dtype=torch.float64, device=groups.device)
    for parameter in model.parameters():
        if parameter.grad is not None and id(parameter) not in ignored:
            num_copies = stage_ranks // _num_shards(parameter.grad)
            own = torch.linalg.vector_norm(local_tensor(parameter.grad), dtype=torch.float64)
            total += own.square() / num_copies
    dist.all_reduce(total)
    norm = total.sqrt().float()
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


def _num_shards(gradient: Tensor) -> int:
    """Returns the number of ranks of a stage over which a gradient is sharded."""
    if not isinstance(gradient, DTensor):
        return 1
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())
