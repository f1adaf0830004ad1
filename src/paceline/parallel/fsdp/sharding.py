"""The sharding and replication of parameters over ranks, and their DTensor specs.

A parameter is a DTensor: optimizers, norms, scalers and checkpoints see its full shape, but compute
with this rank's rows. On a one-dimensional mesh it is sharded over all ranks. On a two-dimensional
mesh, replicate x shard, it is sharded along the second dimension, and ranks along the first hold
the same rows (HSDP).

Checks of fully sharded containers, with errors that name the cause and the remedy.

One parameter of a fully sharded model: this rank's rows, and temporarily all rows.
"""

import dataclasses
import math
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from paceline.core.errors import UsageError
from paceline.parallel.backward_pass import GroupReference
from paceline.parallel.buckets import local_tensor
from paceline.parallel.fsdp.layout import Piece
from paceline.parallel.module_checks import is_compiled, resolve_group

if TYPE_CHECKING:
    from paceline.parallel.fsdp.layers import LayerUser


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


_MIXED = "mixed torch.Tensor and DTensor"


def require_dtypes(**dtypes: torch.dtype | None) -> None:
    """Raises if an option is not a floating-point dtype."""
    for name, dtype in dtypes.items():
        if dtype is not None and not dtype.is_floating_point:
            raise UsageError(f"{name} must be a floating-point dtype, got {dtype}")


def require_shardable(module: nn.Module) -> None:
    """Raises if a module has parameters or compiled parts that cannot be sharded."""
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point():
            raise UsageError(
                f"parameter {name!r} is {parameter.dtype}; only real floating-point parameters can "
                "be fully sharded: use another container, or make it a buffer"
            )
    for name, part in module.named_modules():
        if is_compiled(part):
            raise UsageError(
                f"module {name or type(part).__name__!r} is compiled, which would keep freed "
                "parameters in its graph; wrap it uncompiled"
            )


def require_watchable(user: "LayerUser", output: Any, tensors: Sequence[Tensor]) -> None:
    """Raises if an output needs the layer after it is freed: no tensor found, or a view of it."""
    if output is not None and not tensors and torch.is_grad_enabled():
        raise UsageError(
            f"layer {user.name!r} returns a {type(output).__name__}, in which no tensor was found "
            "whose gradient would tell that backward needs the layer; return tensors in tuples, "
            "lists, dictionaries or dataclasses"
        )
    storages = {pointer for layer in user.layers for pointer in layer.addresses()} - {0}
    for tensor in tensors:
        if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in storages:
            raise UsageError(
                f"layer {user.name!r} returns a view of its own parameters, whose memory is freed "
                "when its forward ends; return a copy: .clone()"
            )


def explain_mixed(error: RuntimeError, module: nn.Module) -> UsageError | None:
    """Returns an error that names the module that read a shard; None for other errors."""
    if _MIXED not in str(error):
        return None
    names = {part: name for name, part in module.named_modules()}
    reader = _innermost(error.__traceback__, names)
    return UsageError(
        f"module {reader!r} reads parameters of another module, which are gathered only during "
        "the other module's forward; call that module, or make both one layer: "
        "wrap=WrapPolicy(classes=...)"
    )


def _innermost(traceback: TracebackType | None, names: dict[nn.Module, str]) -> str:
    """Returns the name of the innermost of these modules in a traceback."""
    found = ""
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner in names:
            found = names[owner] or type(owner).__name__
        traceback = traceback.tb_next
    return found


@dataclasses.dataclass(eq=False, kw_only=True)
class LayerParameter:
    """One parameter in its sharded and full form."""

    name: str
    """Name in the inner module."""
    piece: Piece
    shard: nn.Parameter
    """The parameter of optimizers: a DTensor with this rank's rows, or a full plain tensor."""
    local: Tensor
    """This rank's rows, in the flat shard."""
    full: nn.Parameter
    """All rows, while the layer is gathered."""
    spec: DTensorSpec | None
    """Spec of the DTensor; None for a plain parameter."""

    def require_in_place(self) -> None:
        """Raises if the shard is no longer a view of the flat shard, which is gathered."""
        own = local_tensor(self.shard)
        if own.dtype != self.local.dtype or own.device != self.local.device:
            raise UsageError(
                f"parameter {self.name!r} was converted to {own.dtype} on {own.device} after its "
                f"container was created for {self.local.dtype} on {self.local.device}; convert "
                "the model before wrapping it"
            )
        if own.data_ptr() != self.local.data_ptr():
            raise UsageError(
                f"the memory of parameter {self.name!r} was replaced after its container was "
                "created; change its values in place, with copy_ or load_state_dict"
            )

    def add_gradient(self, mean: Tensor) -> None:
        """Adds a mean to the shard's gradient, or sets it if there is none."""
        if self.shard.grad is not None:
            local_tensor(self.shard.grad).add_(mean)
        else:
            self.shard.grad = mean if self.spec is None else as_dtensor(mean, self.spec)
