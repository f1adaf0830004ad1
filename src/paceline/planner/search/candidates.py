"""Every layout that divides the model, the batch and the devices, in chunks of arrays.

A mesh of t tensor, c context, p pipeline and d data-parallel ranks is a candidate if

    t   divides the heads, the key-value heads and the feed-forward width
    c   divides a sequence into 2c equal parts, as balanced causal attention needs
    p   divides the layers, or the layers with embedding and output layer counted as one each
    d   divides the sequences of a step

and t c p d devices are at most those that are held, whole hosts, and no fewer than a given share.
Within a mesh vary: replicas and shards whose product is d, with each ZeRO stage, which context
ranks share in where the framework shards over them too; micro-batches that
divide a rank's sequences; interleaved parts of a stage, where micro-batches come in whole rounds of
p; sequence parallelism, where t divides what a context rank has of a sequence; recomputation. Asked
for what runs, those that `paceline.core.runnable` refuses are left out.

A mixture of experts also has x expert ranks, which divide the number of experts and the t c s ranks
of one stage that are not replicas of each other (t c d where nothing is sharded); t then divides
shared and dense layers instead of experts, and always comes with sequence parallelism, as Megatron
has it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.plan import CHECKPOINTINGS, SHARDINGS, ParallelLayout
from paceline.core.runnable import Work, refusals
from paceline.planner.cost.layouts import CHECKPOINTING, SHARDING_STAGES, Integers, Layouts
from paceline.planner.search.meshes import Mesh, divides_layers, divisors, expert_sizes, meshes
from paceline.planner.search.question import SearchQuestion

Array = npt.NDArray[Any]
CHUNK = 65_536
"""Candidates that are evaluated at a time: few enough for arrays to stay in the cache."""
_SHARDING_FIELDS = ("replicate", "shard", "stage")
_PASS_FIELDS = ("micro_batch", "num_micro_batches", "pipeline_interleave")
_OTHER_FIELDS = (
    *_PASS_FIELDS,
    *("sequence_parallel", "checkpointing", "tensor", "context", "pipeline"),
)
_FIELDS = (*_SHARDING_FIELDS, *_OTHER_FIELDS)
_MIXTURE_FIELDS = (*_SHARDING_FIELDS, "expert", *_OTHER_FIELDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidates:
    """Layouts with their micro-batches, one array per field."""

    layouts: Layouts
    micro_batch: Integers
    """Sequences in one forward pass."""
    num_micro_batches: Integers
    """Passes per step."""

    def __len__(self) -> int:
        return len(self.micro_batch)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the arrays; only mixtures have expert ranks."""
        return _MIXTURE_FIELDS if np.ndim(self.layouts.expert) else _FIELDS

    def take(self, chosen: Array) -> "Candidates":
        """Returns those at these places, or where a mask is true."""
        names = (name for name in self.fields if "micro" not in name)
        fields = {name: getattr(self.layouts, name)[chosen] for name in names}
        return Candidates(
            layouts=dataclasses.replace(self.layouts, **fields),
            micro_batch=self.micro_batch[chosen],
            num_micro_batches=self.num_micro_batches[chosen],
        )

    @property
    def num_devices(self) -> Integers:
        """Devices that each uses."""
        layouts = self.layouts
        model = layouts.tensor * layouts.context * layouts.pipeline
        return np.asarray(model * layouts.replicate * layouts.shard)

    @property
    def columns(self) -> Array:
        """One column per candidate, from which `candidates_of` makes them again."""
        batch = {"micro_batch": self.micro_batch, "num_micro_batches": self.num_micro_batches}
        return np.stack(
            [batch[name] if name in batch else getattr(self.layouts, name) for name in self.fields]
        ).astype(np.int64)


def candidates_of(columns: Array, question: SearchQuestion) -> Candidates:
    """Makes candidates of columns of numbers."""
    names = _FIELDS if question.experts is None else _MIXTURE_FIELDS
    fields = dict(zip(names, columns, strict=True))
    micro_batch, passes = fields.pop("micro_batch"), fields.pop("num_micro_batches")
    fields["sequence_parallel"] = fields["sequence_parallel"].astype(bool)
    layouts = Layouts(**fields, shards_context=question.conventions.shards_context)
    return Candidates(layouts=layouts, micro_batch=micro_batch, num_micro_batches=passes)


def candidate_chunks(question: SearchQuestion, chunk: int = CHUNK) -> Iterator[Candidates]:
    """Yields every candidate once, in chunks of about so many, or of one mesh if that has more."""
    variants = _Variants(question)
    waiting: list[tuple[Mesh, tuple[Array, ...]]] = []
    size = 0
    for mesh in meshes(question):
        parts = variants.of(mesh)
        num_variants = math.prod(part.shape[1] for part in parts)
        if size and size + num_variants > chunk:
            yield _filled(question, waiting, size)
            waiting, size = [], 0
        waiting.append((mesh, parts))
        size += num_variants
    if size:
        yield _filled(question, waiting, size)


def _filled(
    question: SearchQuestion, blocks: Sequence[tuple[Mesh, tuple[Array, ...]]], size: int
) -> Candidates:
    """Makes the candidates of several meshes: every combination of what varies on each."""
    num_fields = len(_FIELDS if question.experts is None else _MIXTURE_FIELDS)
    columns = np.empty((num_fields, size), dtype=np.int64)
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
    return candidates_of(columns, question)


class _Variants:
    """What varies on a mesh; meshes with the same axis sizes share it."""

    def __init__(self, question: SearchQuestion) -> None:
        self._question = question
        self._shardings: dict[tuple[int, ...], Array] = {}
        self._passes: dict[tuple[int, int], Array] = {}

    def of(self, mesh: Mesh) -> tuple[Array, ...]:
        """Returns ways to shard, to cut the batch, to split norms and to recompute."""
        question = self._question
        ranks: tuple[int, ...] = (mesh.data, mesh.context > 1, mesh.tensor * mesh.pipeline > 1)
        if question.experts is not None:
            ranks = (mesh.data, mesh.context, mesh.tensor)
        if ranks not in self._shardings:
            self._shardings[ranks] = _sharded(question, mesh)
        key = (mesh.data, mesh.pipeline)
        if key not in self._passes:
            self._passes[key] = _allowed(question, mesh, _passes(question, mesh), _PASS_FIELDS)
        streams = _allowed(question, mesh, _streams(question, mesh), ("sequence_parallel",))
        kinds = [(kind,) for kind in CHECKPOINTING.values()]
        recomputed = _allowed(question, mesh, kinds, ("checkpointing",))
        return self._shardings[ranks], self._passes[key], streams, recomputed


def _allowed(
    question: SearchQuestion, mesh: Mesh, rows: Sequence[tuple[int, ...]], fields: Sequence[str]
) -> Array:
    """Returns the rows that run, one per column, and differ in nothing from what is given."""
    given: list[Callable[[tuple[int, ...]], bool]] = [
        lambda row, place=place, value=question.fixed[field]: row[place] == value  # type: ignore[misc]
        for place, field in enumerate(fields)
        if field in question.fixed
    ]
    kept = [row for row in rows if all(agrees(row) for agrees in given)]
    if question.runnable:
        kept = [row for row in kept if _runs(question, mesh, dict(zip(fields, row, strict=True)))]
    return np.array(kept, dtype=np.int64).reshape(-1, len(fields)).T


def _sharded(question: SearchQuestion, mesh: Mesh) -> Array:
    """Returns the ways to shard, each with every number of expert ranks where there are experts."""
    rows = _shardings(question, mesh)
    if question.experts is None:
        return _allowed(question, mesh, rows, _SHARDING_FIELDS)
    with_experts = [
        (*row, expert) for row in rows for expert in expert_sizes(question.experts, mesh, row)
    ]
    return _allowed(question, mesh, with_experts, (*_SHARDING_FIELDS, "expert"))


def _runs(question: SearchQuestion, mesh: Mesh, varied: Mapping[str, int]) -> bool:
    """Whether our own trainer runs a mesh with some fields, whatever the others are."""
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
        shape=question.shape,
        context_length=question.context_length,
        num_micro_batches=varied.get("num_micro_batches"),
    )
    return not refusals(layout, work)


def _shardings(question: SearchQuestion, mesh: Mesh) -> list[tuple[int, int, int]]:
    """Returns replicas, shards and ZeRO stage; where nothing is shared the stage is 0."""
    stages = tuple(stage for stage in SHARDING_STAGES.values() if stage > 0)
    over_context = question.conventions.shards_context and mesh.context > 1
    sharded = [
        (mesh.data // shard, shard, stage)
        for shard in divisors(mesh.data)
        if shard > 1 or over_context
        for stage in stages
    ]
    return [(mesh.data, 1, 0), *sharded]


def _passes(question: SearchQuestion, mesh: Mesh) -> list[tuple[int, int, int]]:
    """Returns micro-batch, passes and interleaved parts of a stage."""
    per_rank = question.global_batch // mesh.data
    layers, stages = question.shape.num_layers, mesh.pipeline
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


def _streams(question: SearchQuestion, mesh: Mesh) -> list[tuple[int]]:
    """Returns whether norms and residuals are split, where they can be."""
    divides = question.context_length // mesh.context % mesh.tensor == 0
    if question.experts is not None and mesh.tensor > 1:
        return [(1,)] if divides else []
    return [(0,), (1,)] if mesh.tensor > 1 and divides else [(0,)]
