"""Which ranks do what together under a layout.

Ranks are numbered as the planner prices them, outermost first:

    pipeline, replicate, shard, context, tensor

so that the axes that talk most lie closest together. Context ranks hold the same parameters and see
other tokens, so their gradients are averaged as those of data-parallel ranks are: where states are
sharded, they are sharded over shard × context; where nothing is, all are replicas.
"""

from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.core.errors import UsageError
from paceline.core.plan import ParallelLayout

_STATE_AXES = ("pipeline", "replicate", "shard", "tensor")


class Coordinates(NamedTuple):
    """Where a rank is on each axis, outermost first."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int


def coordinates_of(rank: int, layout: ParallelLayout) -> Coordinates:
    """Returns where a rank is on each axis."""
    places = []
    for axis in reversed(Coordinates._fields):
        rank, place = divmod(rank, getattr(layout, axis))
        places.append(place)
    return Coordinates(*reversed(places))


class MeshGroups:
    """The groups of a layout, as this rank sees them; all ranks make them together.

    Args:
        layout: Has as many ranks as there are.
        rank: This one.
        world_size: How many ranks there are.
        device: What this rank computes on.
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
        """Which sequences this rank reads, of `data_ranks`; others may read the same."""
        return self.at.replicate * self.layout.shard + self.at.shard

    @property
    def data_ranks(self) -> int:
        """Over how many ranks the sequences of a batch are divided."""
        return self.layout.data_parallel

    @property
    def gradient_ranks(self) -> int:
        """Over how many ranks the gradient of a parameter is averaged."""
        return self.layout.data_parallel * self.layout.context

    @property
    def tensor(self) -> DeviceMesh | None:
        """The ranks that split each matrix, None where they are one."""
        return self._states["tensor"] if self.layout.tensor > 1 else None

    @property
    def context(self) -> DeviceMesh | None:
        """The ranks that split each sequence, None where they are one."""
        return self._context

    @property
    def pipeline(self) -> DeviceMesh | None:
        """The stages, None where there is one."""
        return self._states["pipeline"] if self.layout.pipeline > 1 else None

    @property
    def shards(self) -> DeviceMesh | None:
        """Ranks that states are sharded over, replicas outside; None if nothing is sharded."""
        if self._states["shard"].size() == 1:
            return None
        has_replicas = self._states["replicate"].size() > 1
        return self._states["replicate", "shard"] if has_replicas else self._states["shard"]

    @property
    def replicas(self) -> DeviceMesh | None:
        """Ranks with the same whole parameters; None if gradients are not averaged over such."""
        is_sharded = self._states["shard"].size() > 1
        replicas = self._states["replicate"]
        return None if is_sharded or replicas.size() == 1 else replicas


def describe(layout: ParallelLayout) -> str:
    """Returns what is more than 1 of a layout, such as "shard 2, tensor 4, sequence parallel"."""
    sizes = {axis: getattr(layout, axis) for axis in Coordinates._fields}
    sizes["interleave"] = layout.pipeline_interleave
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    words += ["sequence parallel"] if layout.sequence_parallel else []
    return ", ".join(words) or "one rank"


def _state_sizes(layout: ParallelLayout) -> tuple[int, int]:
    """Returns over how many ranks states are replicated, and over how many sharded."""
    if layout.sharding == "none":
        return layout.replicate * layout.context, 1
    return layout.replicate, layout.shard * layout.context
