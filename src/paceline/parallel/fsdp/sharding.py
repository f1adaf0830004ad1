"""The sharding and replication of parameters over ranks, and their DTensor specs.

A parameter is a DTensor: optimizers, norms, scalers and checkpoints see its full shape, but compute
with this rank's rows. On a one-dimensional mesh it is sharded over all ranks. On a two-dimensional
mesh, replicate x shard, it is sharded along the second dimension, and ranks along the first hold
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
    """The distribution of parameters over ranks."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    """DTensor placements, one per dimension of the mesh."""
    shard_group: GroupReference | None
    """The ranks over which a parameter is sharded; None if each rank has all of it."""
    replicate_groups: tuple[GroupReference, ...]
    """Further groups over which gradients are summed."""

    @property
    def num_shards(self) -> int:
        """Number of ranks over which a parameter is sharded."""
        return 1 if self.shard_group is None else dist.get_world_size(self.shard_group.get())

    @property
    def shard(self) -> int:
        """Index of this rank's shard."""
        return 0 if self.shard_group is None else dist.get_rank(self.shard_group.get())

    @property
    def num_ranks(self) -> int:
        """Number of ranks over which gradients are averaged."""
        others = (dist.get_world_size(group.get()) for group in self.replicate_groups)
        return self.num_shards * math.prod(others)

    def spec(self, shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
        """Returns the DTensor spec of a parameter."""
        meta = torch.empty(shape, dtype=dtype, device="meta")
        return DTensorSpec(
            self.mesh, self.placements, tensor_meta=TensorMeta(shape, meta.stride(), dtype)
        )


def as_dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Wraps this rank's rows in a DTensor that shares their memory, without communication."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def resolve_sharding(
    where: dist.ProcessGroup | DeviceMesh | None, device: torch.device
) -> tuple[dist.ProcessGroup, Sharding, Sharding]:
    """Returns the group of all ranks, and the shardings of sharded and replicated parameters.

    Args:
        where: A group, a one-dimensional mesh, or a two-dimensional one: replicate x shard.
        device: The device of the parameters.
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
        # torch treats meshes of the same ranks as equal, and would reuse cached data of a mesh
        # whose group has been destroyed. Distinct names make them unequal.
        name = None if group is dist.group.WORLD else (f"shard of group {group.group_name}",)
        mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=name)
        # The mesh finds the group by name, and must not keep it alive after its destruction.
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
