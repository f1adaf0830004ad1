"""The distribution of a layer's parameters over ranks, and their positions in flat shards.

A parameter is a DTensor: optimizers, norms, scalers and checkpoints see its full shape, but compute
with this rank's rows. On a one-dimensional mesh it is sharded over all ranks. On a two-dimensional
mesh, replicate x shard, it is sharded along the second dimension, and ranks along the first hold
the same rows (HSDP).

A parameter's rows (its first dimension) are divided into one piece per rank. All pieces have
equally many rows, except the last ones, which may have fewer or none: torch's `Shard(0)`. A rank's
pieces of all parameters of a layer are concatenated in its flat shard, each padded to the same
length on every rank and to 16 bytes.

An all-gather collects a *run* of the flat shards: ``[rank][run]``. If a run is one parameter, the
result is the full parameter, without a copy. Large parameters are therefore separate runs, and are
used in the receive buffer. Small parameters share a run, because each message has a cost, and are
copied out. A gradient message is ``[rank][flat shard, one flag per parameter]``.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from paceline.accounting.buckets import aligned
from paceline.core.errors import UsageError
from paceline.core.units import MIB
from paceline.parallel.ranks.collectives import GroupReference, resolve_group


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

    @functools.cached_property
    def num_shards(self) -> int:
        """Number of ranks over which a parameter is sharded."""
        return 1 if self.shard_group is None else dist.get_world_size(self.shard_group.get())

    @functools.cached_property
    def shard(self) -> int:
        """Index of this rank's shard."""
        return 0 if self.shard_group is None else dist.get_rank(self.shard_group.get())

    @functools.cached_property
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


def resolve_sharding(
    where: dist.ProcessGroup | DeviceMesh | None, device: torch.device
) -> tuple[dist.ProcessGroup, Sharding, Sharding]:
    """Returns the group of all ranks, and the shardings of sharded and replicated parameters.

    A mesh has one dimension, or two: replicate x shard.
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
    sharded = Sharding(
        mesh=mesh, placements=(Shard(0),), shard_group=reference, replicate_groups=()
    )
    replicated = Sharding(
        mesh=mesh, placements=(Replicate(),), shard_group=None, replicate_groups=(reference,)
    )
    return group, sharded, replicated


def _two_dimensions(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, Sharding, Sharding]:
    replicate, shard = (GroupReference(mesh.get_group(dimension)) for dimension in range(2))
    whole = dist.group.WORLD
    if mesh.size() != dist.get_world_size():
        whole = mesh._flatten().get_group()
    assert whole is not None
    sharded = Sharding(
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
    return whole, sharded, replicated


_ALONE_BYTES = MIB
"""Full parameters from this size on are separate runs: a copy would cost more than a message."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A parameter's position in every rank's flat shard."""

    shape: torch.Size
    rows: int
    """Maximum number of rows of a rank."""
    offset: int
    num_elements: int
    """Maximum number of elements of a rank."""

    def is_even(self, num_shards: int) -> bool:
        """Returns whether all ranks have equally many rows."""
        return bool(self.shape) and self.shape[0] == self.rows * num_shards

    def num_rows(self, shard: int) -> int:
        """Returns the number of rows of a rank."""
        length = self.shape[0] if self.shape else 1
        return max(0, min(self.rows, length - shard * self.rows))

    def local(self, flat: Tensor, shard: int) -> Tensor:
        """Returns a rank's rows as a shaped view of its flat shard."""
        num_rows = self.num_rows(shard)
        width = self.num_elements // self.rows if self.rows else 0
        shape = (num_rows, *self.shape[1:]) if self.shape else ()
        return flat[self.offset : self.offset + num_rows * width].view(shape)

    def own_rows(self, full: Tensor, shard: int) -> Tensor:
        """Returns a rank's rows of the full parameter."""
        return full.narrow(0, min(shard * self.rows, full.shape[0]), self.num_rows(shard))

    def blocks(
        self, rows: Tensor, full: Tensor, *, begin: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields views of all ranks' pieces, and the same elements of the full parameter.

        There are at most two pairs, regardless of the number of ranks.

        A row of `rows` is one rank's slice of its flat shard that starts at `begin`.
        """
        if not self.num_elements:
            return
        offset = self.offset - begin
        full = full if full.dim() else full.unsqueeze(0)
        num_whole, rest = divmod(full.shape[0], self.rows)
        if num_whole:
            pieces = rows[:num_whole, offset : offset + self.num_elements]
            rest_of_shape = full.shape[1:]
            yield (
                pieces.view(num_whole, self.rows, *rest_of_shape),
                full[: num_whole * self.rows].view(num_whole, self.rows, *rest_of_shape),
            )
        if rest:
            length = rest * (self.num_elements // self.rows)
            last = rows[num_whole, offset : offset + length].view(rest, *full.shape[1:])
            yield last, full[num_whole * self.rows :]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A range of the flat shard that is gathered in one message."""

    begin: int
    end: int
    is_one: bool
    """Whether the run is one parameter, so that the gathered buffer is the full parameter."""

    def __contains__(self, piece: Piece) -> bool:
        return piece.num_elements > 0 and self.begin <= piece.offset < self.end


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerLayout:
    """The positions of a layer's parameters."""

    dtype: torch.dtype
    device: torch.device
    num_shards: int
    pieces: tuple[Piece, ...]
    runs: tuple[Run, ...]
    length: int
    """Elements of a flat shard."""
    packed_length: int
    """Elements at its beginning that are gathered together."""

    @property
    def row_length(self) -> int:
        """Elements of a gradient message for one rank."""
        return self.length + aligned(len(self.pieces), self.dtype.itemsize)

    @functools.cached_property
    def _columns(self) -> tuple[list[int], list[int]]:
        """The widths of the columns of a gradient message, and each parameter's column."""
        widths: list[int] = []
        column_of = [0] * len(self.pieces)
        end = 0
        for index, piece in sorted(enumerate(self.pieces), key=lambda item: item[1].offset):
            if piece.offset > end:
                widths.append(piece.offset - end)
            column_of[index] = len(widths)
            widths.append(piece.num_elements)
            end = piece.offset + piece.num_elements
        return [*widths, self.row_length - end], column_of

    def columns(self, message: Tensor) -> list[Tensor]:
        """Returns views of all ranks' pieces of each parameter in a gradient message."""
        widths, column_of = self._columns
        columns = message.split_with_sizes(widths, 1)
        return [columns[index] for index in column_of]

    @functools.cached_property
    def packed_widths(self) -> list[int] | None:
        """The lengths of the pieces that are gathered together, in the order of the parameters.

        None if there are gaps between them, or if ranks have different numbers of rows.
        """
        packed = [piece for piece in self.pieces if not self.travels_alone(piece)]
        widths = [piece.num_elements for piece in packed]
        is_even = all(piece.is_even(self.num_shards) for piece in packed)
        return widths if is_even and sum(widths) == self.packed_length else None

    def rows(self, run: Run, alone: Tensor, packed: Tensor) -> Tensor:
        """Returns the receive buffer of a run, one row per rank.

        `alone` receives parameters that are separate runs, `packed` those that are gathered
        together.
        """
        if not run.is_one:
            return packed.view(self.num_shards, self.packed_length)
        begin = self.place_alone(run.begin)
        length = run.end - run.begin
        return alone[begin : begin + length * self.num_shards].view(self.num_shards, length)

    def place_alone(self, offset: int) -> int:
        """Returns the position in `alone` of a separate parameter, by its offset in the shard."""
        return (offset - self.packed_length) * self.num_shards

    def travels_alone(self, piece: Piece) -> bool:
        """Returns whether a parameter is a separate run, used in the receive buffer."""
        return any(run.is_one and piece in run for run in self.runs)


def lay_out(
    parameters: Sequence[Tensor], dtype: torch.dtype, device: torch.device, num_shards: int
) -> LayerLayout:
    """Places parameters in a flat shard."""
    travels_alone = [
        parameter.is_contiguous()
        and (num_shards == 1 or parameter.numel() * dtype.itemsize >= _ALONE_BYTES)
        for parameter in parameters
    ]
    pieces: dict[int, Piece] = {}
    runs: list[Run] = []
    offset = packed_length = 0
    for alone in (False, True):
        begin = offset
        for index, parameter in enumerate(parameters):
            if travels_alone[index] is not alone:
                continue
            rows = -(-(parameter.shape[0] if parameter.dim() else 1) // num_shards)
            num_elements = rows * math.prod(parameter.shape[1:])
            pieces[index] = Piece(
                shape=parameter.shape, rows=rows, offset=offset, num_elements=num_elements
            )
            if alone and num_elements:
                runs.append(Run(begin=offset, end=offset + num_elements, is_one=True))
            offset += aligned(num_elements, dtype.itemsize)
        if not alone and offset > begin:
            runs.append(Run(begin=begin, end=offset, is_one=False))
            packed_length = offset
    return LayerLayout(
        dtype=dtype,
        device=device,
        num_shards=num_shards,
        pieces=tuple(pieces[index] for index in range(len(parameters))),
        runs=tuple(runs),
        length=offset,
        packed_length=packed_length,
    )
