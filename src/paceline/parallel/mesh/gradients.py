"""The norm of all gradients of a layout, whoever has them, and clipping to it.

Every rank adds up the squares of the gradients that it has, each divided by the number of ranks
that have the same: those of its stage over which the parameter is not sharded. One sum over all is
then the square of the norm, and the same to the bit on all of them, as copies of a parameter need
it to stay equal. (torch's own norm of DTensors makes a sum for every axis, of which it warns that
ranks may round differently.)
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
    """Scales gradients down to a norm; returns the norm that they had. All ranks call it.

    Args:
        model: This rank's stages.
        groups: All ranks.
        max_norm: The largest norm that is left as it is.
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
    """Returns over how many ranks of a stage a gradient is sharded."""
    if not isinstance(gradient, DTensor):
        return 1
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())
