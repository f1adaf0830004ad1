"""Applies a layout to a model, one technique after another in the required order.

1. Tensor parallelism: matrices become DTensors; all later steps see their local parts.
2. Context parallelism: attention sees the tokens of all ranks that share a sequence.
3. Activation checkpointing is part of the model: its forward runs each block, with everything
   applied here, under torch's checkpoint.
4. Compilation, block by block: before data parallelism, whose hooks must stay out of the graphs.
5. Data parallelism: FSDP2 gathers a block's parameters before it runs, and reduces its gradients
   when they are complete, over shard × context ranks and then over replicas. Without sharding,
   FSDP2's replicate averages the gradients; ZeRO-2 keeps parameters gathered until backward, ZeRO-3
   gathers them again.

The total norm of all gradients of a layout, and clipping to it.

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
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from paceline.parallel.buckets import local_tensor
from paceline.parallel.mesh.context import apply_context_parallelism
from paceline.parallel.mesh.groups import MeshGroups
from paceline.parallel.mesh.tensor import apply_tensor_parallelism, complete_gradients


def apply_layout(model: nn.Module, groups: MeshGroups, *, compile_blocks: bool = False) -> None:
    """Distributes a model or a pipeline stage over the ranks of a stage, in place.

    Parameter names do not change.

    Args:
        model: A `TransformerLM` with the same weights on all ranks, or a stage of one: `blocks`
            with a subset of the blocks, and None for a missing `embedding`, `final_norm` or `head`.
        groups: The groups of a supported layout.
        compile_blocks: Whether to compile each block.
    """
    layout = groups.layout
    blocks = list(model.get_submodule("blocks").children())
    if groups.tensor is not None:
        apply_tensor_parallelism(model, groups.tensor, sequence_parallel=layout.sequence_parallel)
    if groups.context is not None:
        apply_context_parallelism(model, groups.context)
    if compile_blocks:
        for block in blocks:
            block.compile()
    for part in [*blocks, model]:
        if groups.shards is not None:
            # The root is never resharded: backward needs it immediately.
            reshard = layout.sharding == "parameters" and part is not model
            fully_shard(part, mesh=groups.shards, reshard_after_forward=reshard)
        elif groups.replicas is not None:
            replicate(part, mesh=groups.replicas)


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
