"""The process groups of a layout, its application to a model, and clipping under it.

Ranks are numbered in the order that the planner assumes, outermost axis first:

    pipeline, replicate, shard, context, tensor

so the axes with the most communication connect the closest ranks. Context ranks hold the same
parameters and see different tokens, so their gradients are averaged like those of data-parallel
ranks: sharded states are sharded over shard × context; without sharding, all are replicas.

`apply_layout` applies one technique after another in the required order:

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

from collections.abc import Collection
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from paceline.core.errors import UsageError
from paceline.core.plan import ParallelLayout
from paceline.parallel.dtensor import complete_gradients, local_tensor, num_shards
from paceline.parallel.mesh.context import apply_context_parallelism
from paceline.parallel.mesh.tensor import apply_tensor_parallelism

_STATE_AXES = ("pipeline", "replicate", "shard", "tensor")


class Coordinates(NamedTuple):
    """The index of a rank on each axis, outermost first."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int


def coordinates_of(rank: int, layout: ParallelLayout) -> Coordinates:
    """Returns the index of a rank on each axis."""
    indices = []
    for axis in reversed(Coordinates._fields):
        rank, index = divmod(rank, getattr(layout, axis))
        indices.append(index)
    return Coordinates(*reversed(indices))


class MeshGroups:
    """This rank's groups of a layout; all ranks must create them together."""

    def __init__(
        self, layout: ParallelLayout, rank: int, world_size: int, device: torch.device
    ) -> None:
        if layout.world_size != world_size:
            raise UsageError(
                f"a layout of {layout.world_size} ranks ({describe(layout)}) cannot run on "
                f"{world_size}; start {layout.world_size}, or change an axis"
            )
        self.layout = layout
        self.device = device
        self.at = coordinates_of(rank, layout)
        replicas, shards = layout.replicate, layout.shard * layout.context
        if layout.sharding == "none":
            replicas, shards = layout.replicate * layout.context, 1
        self._states = init_device_mesh(
            device.type,
            (layout.pipeline, replicas, shards, layout.tensor),
            mesh_dim_names=_STATE_AXES,
        )
        self.context: DeviceMesh | None = None
        """The ranks that split each sequence; None for a single rank."""
        if layout.context > 1:
            outer = layout.pipeline * layout.replicate * layout.shard
            sequences = init_device_mesh(
                device.type,
                (outer, layout.context, layout.tensor),
                mesh_dim_names=("outer", "context", "tensor"),
            )
            self.context = sequences["context"]

    @property
    def data_rank(self) -> int:
        """Index among `data_ranks` of the sequences that this rank reads; others may share it."""
        return self.at.replicate * self.layout.shard + self.at.shard

    @property
    def data_ranks(self) -> int:
        """Number of shares into which the sequences of a batch are divided."""
        return self.layout.data_parallel

    @property
    def gradient_ranks(self) -> int:
        """Number of ranks over which the gradient of a parameter is averaged."""
        return self.layout.data_parallel * self.layout.context

    @property
    def tensor(self) -> DeviceMesh | None:
        """The ranks that split each matrix; None for a single rank."""
        return self._states["tensor"] if self.layout.tensor > 1 else None

    @property
    def pipeline(self) -> DeviceMesh | None:
        """The ranks of the pipeline; None for a single stage."""
        return self._states["pipeline"] if self.layout.pipeline > 1 else None

    @property
    def shards(self) -> DeviceMesh | None:
        """Ranks over which states are sharded, replicas as outer axis; None without sharding."""
        if self._states["shard"].size() == 1:
            return None
        has_replicas = self._states["replicate"].size() > 1
        return self._states["replicate", "shard"] if has_replicas else self._states["shard"]

    @property
    def replicas(self) -> DeviceMesh | None:
        """Ranks that hold the same full parameters; None with sharding or for a single replica."""
        is_sharded = self._states["shard"].size() > 1
        replicas = self._states["replicate"]
        return None if is_sharded or replicas.size() == 1 else replicas


def describe(layout: ParallelLayout) -> str:
    """Returns the axes larger than 1 as text, such as "shard 2, tensor 4, sequence parallel"."""
    sizes = {axis: getattr(layout, axis) for axis in Coordinates._fields}
    sizes["interleave"] = layout.pipeline_interleave
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    words += ["sequence parallel"] if layout.sequence_parallel else []
    return ", ".join(words) or "one rank"


def apply_layout(model: nn.Module, groups: MeshGroups, *, compile_blocks: bool = False) -> None:
    """Distributes a model or a pipeline stage over the ranks of a stage, in place.

    The model is a `TransformerLM` with the same weights on all ranks, or a stage of one: `blocks`
    with a subset of the blocks, and None for a missing `embedding`, `final_norm` or `head`.
    Parameter names do not change.
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

    Every rank sums the squares of its gradients, each divided by its number of copies: the ranks of
    the stage over which the parameter is not sharded. One all-reduce over all ranks then gives the
    square of the norm. It is bitwise equal on all ranks, which keeps copies of a parameter equal.
    (torch's own norm of DTensors reduces each axis separately, and warns that ranks may round
    differently.) `uncounted` are parameters that another stage counts, such as the copy of a tied
    embedding.
    """
    complete_gradients(model)
    ignored = {id(parameter) for parameter in uncounted}
    stage_ranks = groups.layout.world_size // groups.layout.pipeline
    total = torch.zeros((), dtype=torch.float64, device=groups.device)
    for parameter in model.parameters():
        if parameter.grad is not None and id(parameter) not in ignored:
            num_copies = stage_ranks // num_shards(parameter.grad)
            own = torch.linalg.vector_norm(local_tensor(parameter.grad), dtype=torch.float64)
            total += own.square() / num_copies
    dist.all_reduce(total)
    norm = total.sqrt().float()
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm
