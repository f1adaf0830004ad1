"""The process groups of a layout.

Ranks are numbered in the order that the planner assumes, outermost axis first:

    pipeline, replicate, shard, context, tensor

so the axes with the most communication connect the closest ranks. Context ranks hold the same
parameters and see different tokens, so their gradients are averaged like those of data-parallel
ranks: sharded states are sharded over shard × context; without sharding, all are replicas.
"""

from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.core.errors import UsageError
from paceline.core.plan import ParallelLayout

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
    places = []
    for axis in reversed(Coordinates._fields):
        rank, place = divmod(rank, getattr(layout, axis))
        places.append(place)
    return Coordinates(*reversed(places))


class MeshGroups:
    """This rank's groups of a layout; all ranks must create them together.

    Args:
        layout: The layout, of `world_size` ranks.
        rank: This rank.
        world_size: Number of all ranks.
        device: The device that this rank computes on.
    """

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
        replicas, shards = _state_sizes(layout)
        self._states = init_device_mesh(
            device.type,
            (layout.pipeline, replicas, shards, layout.tensor),
            mesh_dim_names=_STATE_AXES,
        )
        self._context: DeviceMesh | None = None
        if layout.context > 1:
            outer = layout.pipeline * layout.replicate * layout.shard
            sequences = init_device_mesh(
                device.type,
                (outer, layout.context, layout.tensor),
                mesh_dim_names=("outer", "context", "tensor"),
            )
            self._context = sequences["context"]

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
    def context(self) -> DeviceMesh | None:
        """The ranks that split each sequence; None for a single rank."""
        return self._context

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


def _state_sizes(layout: ParallelLayout) -> tuple[int, int]:
    """Returns the numbers of ranks over which states are replicated and sharded."""
    if layout.sharding == "none":
        return layout.replicate * layout.context, 1
    return layout.replicate, layout.shard * layout.context
