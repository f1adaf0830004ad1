"""A layout applied to a model, each technique in the order that it must have.

1. Tensor: matrices become DTensors, of which everything after it sees the local parts.
2. Context: attention sees the tokens of all ranks that share a sequence.
3. Activation checkpointing is the model's own: its forward runs whole blocks, with all that is put
   on them here, under torch's checkpoint.
4. Compilation, block by block: before data parallelism, whose hooks no graph should hold.
5. Data parallelism: FSDP2 gathers a block's parameters before it runs, and reduces its gradients
   when they are complete, over shard × context ranks, and then over replicas. With sharding none
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
    """Lays a model, or the stage of a pipeline, over the ranks of a stage, in place.

    Names of parameters stay as they are.

    Args:
        model: A `TransformerLM` with the same weights on all ranks, or a stage of one: `blocks`
            without some of them, and None for an `embedding`, `final_norm` or `head` that it lacks.
        groups: Of a layout that can run.
        compile_blocks: Whether each block is compiled.
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
            # The root is needed again as soon as backward begins.
            reshard = layout.sharding == "parameters" and part is not model
            fully_shard(part, mesh=groups.shards, reshard_after_forward=reshard)
        elif groups.replicas is not None:
            replicate(part, mesh=groups.replicas)
