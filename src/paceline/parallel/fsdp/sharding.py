"""Which ranks share a parameter out, which hold the same of it, and what it looks like to torch.

A parameter is a DTensor: to optimizers, norms, scalers and checkpoints it has its full shape, and
what they compute with is this rank's rows of it. On a mesh of one dimension all ranks share it out.
On a mesh of two, replicate x shard, the ranks along the second do, and those along the first hold
the same rows (HSDP).
"""

import dataclasses
import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from paceline.core.errors import UsageError
from paceline.parallel.reducer.module_checks import resolve_group
from paceline.parallel.reducer.settings import GroupReference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharding:
    """How parameters lie on the ranks."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    """In torch's terms, one for each dimension of the mesh."""
    shard_group: GroupReference | None
    """The ranks that share a parameter out; None if each has all of it."""
    replicate_groups: tuple[GroupReference, ...]
    """Groups over which gradients are added up besides."""

    @property
    def num_shards(self) -> int:
        """How many ranks share a parameter out."""
        return 1 if self.shard_group is None else dist.get_world_size(self.shard_group.get())

    @property
    def shard(self) -> int:
        """This rank's place among them."""
        return 0 if self.shard_group is None else dist.get_rank(self.shard_group.get())

    @property
    def num_ranks(self) -> int:
        """How many ranks' gradients are averaged."""
        others = (dist.get_world_size(group.get()) for group in self.replicate_groups)
        return self.num_shards * math.prod(others)

    def spec(self, shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
        """Describes a parameter of a shape to torch."""
        meta = torch.empty(shape, dtype=dtype, device="meta")
        return DTensorSpec(
            self.mesh, self.placements, tensor_meta=TensorMeta(shape, meta.stride(), dtype)
        )


def as_dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Makes a tensor of this rank's rows, which it shares memory with; nothing is sent."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def resolve_sharding(
    where: dist.ProcessGroup | DeviceMesh | None, device: torch.device
) -> tuple[dist.ProcessGroup, Sharding, Sharding]:
    """Returns all ranks, how they share parameters out, and how they hold those that they do not.

    Args:
        where: A group, a mesh of one dimension, or one of two: replicate x shard.
        device: Where parameters are.
    """
    if isinstance(where, DeviceMesh) and where.ndim == 2:
        return _two_dimensions(where)
    if isinstance(where, DeviceMesh) and where.ndim != 1:
        raise UsageError(
            f"a mesh of one dimension (shard) or of two (replicate, shard) is needed, this one has "
            f"{where.ndim}"
        )
    group = resolve_group(where)
    if isinstance(where, DeviceMesh):
        mesh = where
    else:
        # Meshes of the same ranks are equal to torch, which would go on to use what it remembers of
        # one whose group has been destroyed; with names of their own they are not.
        name = None if group is dist.group.WORLD else (f"shard of group {group.group_name}",)
        mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=name)
        # The mesh finds the group by its name, and must not keep it alive when it is destroyed.
        mesh._pg_registry.clear()
    reference = GroupReference(group)
    shared_out = Sharding(
        mesh=mesh, placements=(Shard(0),), shard_group=reference, replicate_groups=()
    )
    replicated = Sharding(
        mesh=mesh, placements=(Replicate(),), shard_group=None, replicate_groups=(reference,)
    )
    return group, shared_out, replicated


def _two_dimensions(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, Sharding, Sharding]:
    replicate, shard = (GroupReference(mesh.get_group(dimension)) for dimension in range(2))
    whole = dist.group.WORLD
    if mesh.size() != dist.get_world_size():
        whole = mesh._flatten().get_group()
    assert whole is not None
    shared_out = Sharding(
        mesh=mesh,
        placements=(Replicate(), Shard(0)),
        shard_group=shard,
        replicate_groups=(replicate,),
    )
    replicated = Sharding(
        mesh=mesh,
        placements=(Replicate(), Replicate()),
        shard_group=None,
        replicate_groups=(shard, replicate),
    )
    return whole, shared_out, replicated
