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
"""

from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard

from paceline.parallel.mesh.context import apply_context_parallelism
from paceline.parallel.mesh.groups import MeshGroups
from paceline.parallel.mesh.tensor import apply_tensor_parallelism


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
