"""Enumerates every layout that divides the model, the batch and the devices, as chunked arrays.

A mesh of t tensor, c context, p pipeline and d data-parallel ranks is a candidate if

    t   divides the heads, the key-value heads and the feed-forward width
    c   divides a sequence into 2c equal parts, as balanced causal attention needs
    p   divides the layers, or the layers with embedding and output layer counted as one each
    d   divides the sequences of a step

and the t c p d devices fill whole hosts, number at most the held devices, and are no fewer than a
given share of them. The layouts of a mesh vary in:

    sharding      replicas and shards with the product d, and the ZeRO stage; context ranks are
                  shards as well if the framework shards over them
    batch         micro-batches that divide a rank's sequences, and interleaved parts of a stage,
                  which require the number of micro-batches to be a multiple of p
    sequence parallelism   if t divides a context rank's part of a sequence
    recomputation

If only runnable layouts are requested, those that `paceline.core.runnable` refuses are excluded.

A mixture of experts also has x expert ranks. x divides the number of experts and the t c s ranks of
one pipeline stage that are not replicas of each other (t c d without sharding). t then divides the
shared and dense layers instead of the experts, and requires sequence parallelism, as in Megatron.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.core.plan import CHECKPOINTINGS, SHARDINGS, ParallelLayout
from paceline.core.runnable import Work, unsupported_reasons
from paceline.planner.search.spec import SearchSpec
from paceline.predict.cost.layouts import CHECKPOINTING, SHARDING_STAGES, Integers, Layouts


class Mesh(NamedTuple):
    """Sizes of the mesh axes."""

    tensor: int
    context: int
    pipeline: int
    data: int

    @property
    def num_devices(self) -> int:
        """Product of all axes."""
        return self.tensor * self.context * self.pipeline * self.data


def meshes(spec: SearchSpec) -> Iterator[Mesh]:
    """Yields every mesh that divides heads, layers, sequences, batch and devices."""
    least = spec.least_used * spec.num_devices
    host = spec.devices_per_host if spec.num_devices >= spec.devices_per_host else 1
    for tensor in _sizes(spec, "tensor", tensor_sizes(spec)):
        for context in _sizes(spec, "context", context_sizes(spec)):
            for pipeline in _sizes(spec, "pipeline", pipeline_sizes(spec)):
                for data in _sizes(spec, "data_parallel", divisors(spec.global_batch)):
                    mesh = Mesh(tensor, context, pipeline, data)
                    used = mesh.num_devices
                    if least <= used <= spec.num_devices and used % host == 0:
                        yield mesh


def tensor_sizes(spec: SearchSpec) -> tuple[int, ...]:
    """Returns the tensor-parallel sizes that divide every matrix of the model."""
    shape, experts = spec.shape, spec.experts
    heads = math.gcd(shape.num_heads, shape.key_value_heads)
    if experts is None:
        return divisors(math.gcd(heads, shape.d_ff))
    return divisors(math.gcd(heads, experts.shared_width, experts.dense_width))


def context_sizes(spec: SearchSpec) -> tuple[int, ...]:
    """Returns the context-parallel sizes that divide a sequence evenly."""
    if not spec.shape.num_heads:
        return ()
    length = spec.context_length
    return tuple(size for size in divisors(length) if size == 1 or length % (2 * size) == 0)


def pipeline_sizes(spec: SearchSpec) -> tuple[int, ...]:
    """Returns the numbers of pipeline stages that divide the layers evenly."""
    layers = spec.shape.num_layers
    return tuple(stages for stages in range(1, layers + 1) if divides_layers(layers, stages))


def divides_layers(num_layers: int, stages: int) -> bool:
    """Whether stages divide the layers, with or without counting embedding and output layer."""
    return num_layers % stages == 0 or (num_layers + 2) % stages == 0


def divisors(number: int) -> tuple[int, ...]:
    """Returns the divisors of a number in ascending order."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return tuple(small + [number // each for each in reversed(small) if each * each != number])


def expert_sizes(spec: SearchSpec, mesh: Mesh, sharding: tuple[int, int, int]) -> tuple[int, ...]:
    """Returns the expert-parallel sizes that divide the experts and the ranks of a stage."""
    if spec.experts is None:
        return (1,)
    _, shard, stage = sharding
    ranks = mesh.tensor * mesh.context * (shard if stage else mesh.data)
    return divisors(math.gcd(spec.experts.num_experts, ranks))


def _sizes(spec: SearchSpec, field: str, sizes: Sequence[int]) -> Sequence[int]:
    """Returns the sizes of an axis, or (1,) if there are none, restricted to a fixed value."""
    sizes = sizes or (1,)
    fixed = spec.fixed.get(field)
    return sizes if fixed is None else tuple(size for size in sizes if size == fixed)


Array = npt.NDArray[Any]
CHUNK = 65_536
"""Number of candidates evaluated at once, small enough for arrays to stay in the cache."""
_SHARDING_FIELDS = ("replicate", "shard", "stage", "expert")
_PASS_FIELDS = ("micro_batch", "num_micro_batches", "pipeline_interleave")
_FIELDS = (
    *_SHARDING_FIELDS,
    *_PASS_FIELDS,
    *("sequence_parallel", "checkpointing", "tensor", "context", "pipeline"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidates:
    """Layouts with their micro-batches, one array per field."""

    layouts: Layouts
    micro_batch: Integers
    """Sequences in one forward pass."""
    num_micro_batches: Integers
    """Forward passes per step."""

    def __len__(self) -> int:
        return len(self.micro_batch)

    def take(self, chosen: Array) -> "Candidates":
        """Returns the candidates at these indices, or where a mask is true."""
        names = (name for name in _FIELDS if "micro" not in name)
        fields = {name: getattr(self.layouts, name)[chosen] for name in names}
        return Candidates(
            layouts=dataclasses.replace(self.layouts, **fields),
            micro_batch=self.micro_batch[chosen],
            num_micro_batches=self.num_micro_batches[chosen],
        )

    @property
    def num_devices(self) -> Integers:
        """Number of devices that each candidate uses."""
        layouts = self.layouts
        model = layouts.tensor * layouts.context * layouts.pipeline
        return np.asarray(model * layouts.replicate * layouts.shard)

    @property
    def columns(self) -> Array:
        """Array with one column per candidate, the inverse of `candidates_of`."""
        batch = {"micro_batch": self.micro_batch, "num_micro_batches": self.num_micro_batches}
        return np.stack(
            [batch[name] if name in batch else getattr(self.layouts, name) for name in _FIELDS]
        ).astype(np.int64)


def candidates_of(columns: Array, spec: SearchSpec) -> Candidates:
    """Returns candidates from an array with one column per candidate."""
    fields = dict(zip(_FIELDS, columns, strict=True))
    micro_batch, passes = fields.pop("micro_batch"), fields.pop("num_micro_batches")
    fields["sequence_parallel"] = fields["sequence_parallel"].astype(bool)
    layouts = Layouts(**fields, shards_context=spec.framework_settings.shards_context)
    return Candidates(layouts=layouts, micro_batch=micro_batch, num_micro_batches=passes)


def candidate_chunks(spec: SearchSpec, chunk: int = CHUNK) -> Iterator[Candidates]:
    """Yields every candidate once, in chunks of at most `chunk`, or of one mesh if it is larger."""
    variants = _Variants(spec)
    waiting: list[tuple[Mesh, tuple[Array, ...]]] = []
    size = 0
    for mesh in meshes(spec):
        parts = variants.of(mesh)
        num_variants = math.prod(part.shape[1] for part in parts)
        if size and size + num_variants > chunk:
            yield _filled(spec, waiting, size)
            waiting, size = [], 0
        waiting.append((mesh, parts))
        size += num_variants
    if size:
        yield _filled(spec, waiting, size)


def _filled(
    spec: SearchSpec, blocks: Sequence[tuple[Mesh, tuple[Array, ...]]], size: int
) -> Candidates:
    """Returns the candidates of several meshes: all combinations of each mesh's variants."""
    columns = np.empty((len(_FIELDS), size), dtype=np.int64)
    begin = 0
    for mesh, parts in blocks:
        sizes = tuple(part.shape[1] for part in parts)
        end = begin + math.prod(sizes)
        row = 0
        for place, part in enumerate(parts):
            along = tuple(-1 if place == other else 1 for other in range(len(parts)))
            for values in part:
                columns[row, begin:end].reshape(sizes)[...] = values.reshape(along)
                row += 1
        columns[row:, begin:end] = np.array([[mesh.tensor], [mesh.context], [mesh.pipeline]])
        begin = end
    return candidates_of(columns, spec)


class _Variants:
    """Variants of each mesh, cached for meshes with the same relevant axis sizes."""

    def __init__(self, spec: SearchSpec) -> None:
        self._spec = spec
        self._shardings: dict[tuple[int, ...], Array] = {}
        self._passes: dict[tuple[int, int], Array] = {}

    def of(self, mesh: Mesh) -> tuple[Array, ...]:
        """Returns the options for sharding, batch, sequence parallelism and recomputation."""
        spec = self._spec
        ranks: tuple[int, ...] = (mesh.data, mesh.context > 1, mesh.tensor * mesh.pipeline > 1)
        if spec.experts is not None:
            ranks = (mesh.data, mesh.context, mesh.tensor)
        if ranks not in self._shardings:
            self._shardings[ranks] = _allowed(spec, mesh, _shardings(spec, mesh), _SHARDING_FIELDS)
        key = (mesh.data, mesh.pipeline)
        if key not in self._passes:
            self._passes[key] = _allowed(spec, mesh, _passes(spec, mesh), _PASS_FIELDS)
        streams = _allowed(spec, mesh, _streams(spec, mesh), ("sequence_parallel",))
        kinds = [(kind,) for kind in CHECKPOINTING.values()]
        recomputed = _allowed(spec, mesh, kinds, ("checkpointing",))
        return self._shardings[ranks], self._passes[key], streams, recomputed


def _allowed(
    spec: SearchSpec, mesh: Mesh, rows: Sequence[tuple[int, ...]], fields: Sequence[str]
) -> Array:
    """Returns the rows that match the fixed fields and run if required, as columns."""
    given: list[Callable[[tuple[int, ...]], bool]] = [
        lambda row, place=place, value=spec.fixed[field]: row[place] == value  # type: ignore[misc]
        for place, field in enumerate(fields)
        if field in spec.fixed
    ]
    kept = [row for row in rows if all(agrees(row) for agrees in given)]
    if spec.runnable:
        kept = [row for row in kept if _runs(spec, mesh, dict(zip(fields, row, strict=True)))]
    return np.array(kept, dtype=np.int64).reshape(-1, len(fields)).T


def _runs(spec: SearchSpec, mesh: Mesh, varied: Mapping[str, int]) -> bool:
    """Whether Paceline's trainer runs a mesh with these fields and defaults for the others."""
    layout = ParallelLayout(
        tensor=mesh.tensor,
        context=mesh.context,
        pipeline=mesh.pipeline,
        replicate=varied.get("replicate", mesh.data),
        shard=varied.get("shard", 1),
        sharding=SHARDINGS[varied.get("stage", 0)],
        sequence_parallel=bool(varied.get("sequence_parallel", 0)),
        pipeline_interleave=varied.get("pipeline_interleave", 1),
        activation_checkpointing=CHECKPOINTINGS[varied.get("checkpointing", 0)],
    )
    work = Work(
        shape=spec.shape,
        context_length=spec.context_length,
        num_micro_batches=varied.get("num_micro_batches"),
    )
    return not unsupported_reasons(layout, work)


def _shardings(spec: SearchSpec, mesh: Mesh) -> list[tuple[int, ...]]:
    """Returns replicas, shards, ZeRO stage (0 if nothing is sharded) and expert ranks."""
    over_context = spec.framework_settings.shards_context and mesh.context > 1
    shards = [shard for shard in divisors(mesh.data) if shard > 1 or over_context]
    stages = [stage for stage in SHARDING_STAGES.values() if stage > 0]
    rows = [(mesh.data, 1, 0)]
    rows += [(mesh.data // shard, shard, stage) for shard in shards for stage in stages]
    return [(*row, expert) for row in rows for expert in expert_sizes(spec, mesh, row)]


def _passes(spec: SearchSpec, mesh: Mesh) -> list[tuple[int, int, int]]:
    """Returns micro-batch size, number of passes and interleaved parts per stage."""
    per_rank = spec.global_batch // mesh.data
    layers, stages = spec.shape.num_layers, mesh.pipeline
    parts = [1]
    if stages > 1:
        most = (layers + 2) // stages
        parts += [each for each in range(2, most + 1) if divides_layers(layers, stages * each)]
    return [
        (size, per_rank // size, part)
        for size in divisors(per_rank)
        for part in parts
        if part == 1 or (per_rank // size) % stages == 0
    ]


def _streams(spec: SearchSpec, mesh: Mesh) -> list[tuple[int]]:
    """Returns the possible settings of sequence parallelism."""
    divides = spec.context_length // mesh.context % mesh.tensor == 0
    if spec.experts is not None and mesh.tensor > 1:
        return [(1,)] if divides else []
    return [(0,), (1,)] if mesh.tensor > 1 and divides else [(0,)]
