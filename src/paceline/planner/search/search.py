"""Exhaustive search for the fastest layouts: every candidate is evaluated, without sampling.

Each chunk is processed in three steps: compute memory, compute the step time of candidates that
fit, and keep the best candidate of every mesh (tensor, context, pipeline and expert ranks). The
result thus contains different meshes instead of variants of one. Memory use does not grow with the
number of candidates. Ties in step time are broken by lower memory, then by fewer techniques.
"""

import dataclasses
import heapq
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.accounting.counts import flops_per_token
from paceline.core.errors import UsageError
from paceline.core.plan import CHECKPOINTINGS, SHARDINGS, Estimate, ParallelLayout
from paceline.core.specs import BatchShape
from paceline.core.units import format_binary_bytes
from paceline.planner.search.candidates import (
    Array,
    Candidates,
    candidate_chunks,
    candidates_of,
    meshes,
)
from paceline.planner.search.spec import PerformanceModel, SearchSpec, describe_fixed
from paceline.predict.cost.layouts import SHARDING_STAGES
from paceline.predict.cost.memory import layout_memory
from paceline.predict.cost.step_time import step_time

_TIE_DIGITS = 9


BOUNDS = {
    "compute_s": "compute",
    "memory_s": "memory bandwidth",
    "optimizer_s": "memory bandwidth",
    "launch_s": "kernel launches",
    "tensor_s": "tensor communication",
    "context_s": "context communication",
    "expert_s": "expert communication",
    "stages_s": "pipeline communication",
    "bubble_s": "pipeline bubble",
    "imbalance_s": "stage imbalance",
    "data_s": "data-parallel communication",
    "engine_s": "calls of torch's engine",
    "fixed_s": "fixed time of a step",
    "measured_s": "what runs of such sizes took beyond the formulas",
    "framework_s": "what the framework takes beyond the formulas",
}
"""Display name of each step-time term."""
_COMMUNICATION = ("tensor_s", "context_s", "expert_s", "stages_s", "data_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout with its predictions."""

    layout: ParallelLayout
    batch: BatchShape
    """Micro-batch and gradient accumulation of one data-parallel rank."""
    devices: int
    """Number of held devices that the layout uses."""
    step_time_s: Estimate
    terms_s: Mapping[str, float]
    """Seconds of a step by term. Their sum is the step time."""
    memory_bytes: Mapping[str, float]
    """Peak memory of one device by part: states, activations, working, framework."""
    capacity_bytes: float
    tokens_per_s: float
    """Throughput of all devices together."""
    outside: tuple[str, ...]
    """Features of the layout that are outside the range of the measured runs."""
    mfu: float | None
    """Model FLOPs, with full attention scores, over the stated peak of the devices used."""

    @property
    def peak_bytes(self) -> float:
        """Peak memory of one device."""
        return sum(self.memory_bytes.values())

    @property
    def headroom(self) -> float:
        """Fraction of memory that stays free at the peak."""
        return 1 - self.peak_bytes / self.capacity_bytes

    @property
    def added_s(self) -> float:
        """Seconds of all terms that take time.

        Shares are fractions of it: a framework that is faster than the formulas has a negative
        term, beside which the others would be more than the step.
        """
        return sum(seconds for seconds in self.terms_s.values() if seconds > 0)

    def share(self, part: str) -> float:
        """Returns the fraction of the step that one of `parts` takes."""
        return self.parts[part] / self.added_s

    @property
    def bubble_share(self) -> float:
        """Fraction of the step in which pipeline stages wait for each other."""
        idle = self.terms_s.get("bubble_s", 0.0) + self.terms_s.get("imbalance_s", 0.0)
        return idle / self.added_s

    @property
    def exposed_share(self) -> float:
        """Fraction of the step that is exposed communication."""
        return sum(self.terms_s.get(name, 0.0) for name in _COMMUNICATION) / self.added_s

    @property
    def bound(self) -> str:
        """Name of the bottleneck that accounts for the largest part of the step."""
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the step by bottleneck, largest first."""
        parts: dict[str, float] = {}
        for term, seconds in self.terms_s.items():
            name = BOUNDS.get(term, term.removesuffix("_s"))
            parts[name] = parts.get(name, 0.0) + seconds
        return dict(sorted(parts.items(), key=lambda part: -part[1]))

    @property
    def name(self) -> str:
        """Short name of the layout."""
        return layout_name(self.layout, self.batch)


class NoLayoutError(UsageError):
    """Raised if no layout divides the work, or none fits the memory of a device."""

    def __init__(self, message: str, least_bytes: float | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best layout of each mesh, fastest first, with candidate counts."""

    spec: SearchSpec
    performance: PerformanceModel
    choices: tuple[Candidate, ...]
    num_candidates: int
    num_fitting: int
    elapsed_s: float

    @property
    def best(self) -> Candidate:
        """The fastest layout."""
        return self.choices[0]


@dataclasses.dataclass(frozen=True)
class _Kept:
    """The best candidate of a mesh, with its sort key."""

    rank: tuple[float, ...]
    column: Array


def search(
    spec: SearchSpec,
    performance: PerformanceModel,
    *,
    top: int = 10,
    peak_flops: float | None = None,
) -> SearchResult:
    """Evaluates every candidate and returns the fastest of at most `top` meshes.

    `peak_flops` is the stated peak FLOP/s of a device, for MFU.
    """
    began = time.perf_counter()
    kept: dict[tuple[int, ...], _Kept] = {}
    num_candidates = num_fitting = 0
    smallest: tuple[float, Array] | None = None
    for chunk in candidate_chunks(spec):
        num_candidates += len(chunk)
        workload = spec.workload(chunk.micro_batch, chunk.num_micro_batches)
        memory = np.broadcast_to(layout_memory(chunk.layouts, workload).total, len(chunk))
        fits = memory <= spec.memory_bytes
        if not fits.any():
            place = int(np.argmin(memory))
            if smallest is None or memory[place] < smallest[0]:
                smallest = float(memory[place]), chunk.columns[:, place]
            continue
        num_fitting += int(fits.sum())
        _keep(kept, chunk.take(fits), memory[fits], spec, performance, top)
    if not kept:
        _raise_none(spec, num_candidates, smallest)
    best = heapq.nsmallest(top, kept.values(), key=lambda each: each.rank)
    found = candidates_of(np.stack([each.column for each in best], axis=1), spec)
    return SearchResult(
        spec=spec,
        performance=performance,
        choices=tuple(evaluate(found, spec, performance, peak_flops)),
        num_candidates=num_candidates,
        num_fitting=num_fitting,
        elapsed_s=time.perf_counter() - began,
    )


def find_best(
    spec: SearchSpec, performance: PerformanceModel, peak_flops: float | None = None
) -> Candidate | None:
    """Returns the fastest layout, or None if none divides the work or fits."""
    try:
        return search(spec, performance, top=1, peak_flops=peak_flops).best
    except NoLayoutError:
        return None


def _keep(
    kept: dict[tuple[int, ...], _Kept],
    fitting: Candidates,
    memory: Array,
    spec: SearchSpec,
    performance: PerformanceModel,
    top: int,
) -> None:
    """Updates the kept candidates with the best of every mesh in a chunk."""
    workload = spec.workload(fitting.micro_batch, fitting.num_micro_batches)
    predicted = step_time(fitting.layouts, workload, performance.cluster, hidden=performance.hidden)
    seconds = np.broadcast_to(predicted.total_s, len(fitting))
    if len(kept) >= top:
        # Candidates slower than the current top cannot appear in the result.
        slowest = heapq.nsmallest(top, kept.values(), key=lambda each: each.rank)[-1].rank[0]
        near = np.round(np.log(seconds), _TIE_DIGITS) <= slowest
        fitting, memory, seconds = fitting.take(near), memory[near], seconds[near]
    if not len(fitting):
        return
    rounded = np.round(np.log(seconds), _TIE_DIGITS)
    layouts = fitting.layouts
    techniques = (
        *(memory, layouts.checkpointing, layouts.stage, layouts.pipeline_interleave),
        *(layouts.sequence_parallel, layouts.shard, layouts.expert),
    )
    order = np.lexsort((*reversed(techniques), rounded))
    columns = fitting.columns
    shown = (layouts.tensor, layouts.context, layouts.pipeline, layouts.expert)
    kinds = np.stack(shown)[:, order]
    _, firsts = np.unique(kinds, axis=1, return_index=True)
    for first in firsts:
        place = int(order[first])
        rank: tuple[Any, ...] = (rounded[place], *(float(each[place]) for each in techniques))
        kind = tuple(int(size) for size in kinds[:, first])
        if kind not in kept or rank < kept[kind].rank:
            kept[kind] = _Kept(rank, columns[:, place])


def _raise_none(
    spec: SearchSpec, num_candidates: int, smallest: tuple[float, Array] | None
) -> None:
    """Raises an error with the reason why there is no layout, and remedies."""
    given = f" with {describe_fixed(spec.fixed)}" if spec.fixed else ""
    heads = f"{spec.shape.num_heads} heads"
    if spec.experts is not None:
        heads += f", {spec.experts.num_experts} experts"
    if smallest is None:
        raise NoLayoutError(
            f"no layout of {spec.num_devices:,} devices{given} divides "
            f"{spec.global_batch:,} sequences of {spec.context_length:,} tokens, "
            f"{spec.shape.num_layers} layers and {heads}; "
            f"{_divisible(spec)}"
        )
    least_bytes, column = smallest
    tightest = _name_of(column, spec)
    more = least_bytes / spec.memory_bytes
    raise NoLayoutError(
        f"none of {num_candidates:,} layouts{given} fits: the smallest ({tightest}) needs "
        f"{format_binary_bytes(least_bytes)} per device, which has "
        f"{format_binary_bytes(spec.memory_bytes)}; {_remedy(spec, more)}",
        least_bytes,
    )


def _name_of(column: Array, spec: SearchSpec) -> str:
    """Returns the short name of the layout in a column."""
    one = candidates_of(column[:, None], spec)
    batch = BatchShape(num_sequences=int(one.micro_batch[0]), context_length=1)
    return layout_name(layout_at(one, 0), batch)


def _divisible(spec: SearchSpec) -> str:
    """Returns advice with the largest number of devices that a layout could use."""
    fewer = dataclasses.replace(spec, least_used=0.0)
    most = max((mesh.num_devices for mesh in meshes(fewer)), default=0)
    instead = "a batch and a number of devices that share more factors, such as powers of two"
    if not most:
        return f"give {instead}"
    return f"{most:,} devices would divide them; use that many, or {instead}"


def _remedy(spec: SearchSpec, more: float) -> str:
    """Returns advice on making the smallest layout fit."""
    larger = f"{more:.1f} times the memory" if more >= 2 else f"{more - 1:.0%} more memory"
    remedies = [f"devices with {larger}", "more devices"]
    if spec.context_length > 8192:
        remedies.append("shorter sequences")
    return ", ".join(remedies[:-1]) + f" or {remedies[-1]} would help"


def evaluate(
    candidates: Candidates,
    spec: SearchSpec,
    performance: PerformanceModel,
    peak_flops: float | None = None,
) -> list[Candidate]:
    """Predicts all terms of each candidate."""
    if not len(candidates):
        return []
    size = len(candidates)
    layouts = candidates.layouts
    workload = spec.workload(candidates.micro_batch, candidates.num_micro_batches)
    time = step_time(layouts, workload, performance.cluster, hidden=performance.hidden)
    memory = layout_memory(layouts, workload)
    low, high = performance.interval(layouts, workload)

    def spread(values: object) -> list[float]:
        return [float(value) for value in np.broadcast_to(np.asarray(values, dtype=float), size)]

    total, lows, highs = spread(time.total_s), spread(low), spread(high)
    terms = {field.name: spread(getattr(time, field.name)) for field in dataclasses.fields(time)}
    parts = {
        "states": spread(memory.states.total),
        "activations": spread(memory.activations),
        "working": spread(memory.working),
        "framework": spread(memory.framework),
    }
    per_token = flops_per_token(spec.shape, spec.context_length).model
    flops = per_token * spec.tokens_per_step
    devices = candidates.num_devices
    found = []
    for place in range(size):
        seconds = total[place]
        used = int(devices[place])
        # No run is faster than the device's peak.
        least = 0.0 if peak_flops is None else flops / (used * peak_flops)
        one = candidates.take(np.array([place]))
        found.append(
            Candidate(
                layout=layout_at(candidates, place),
                batch=BatchShape(
                    num_sequences=int(candidates.micro_batch[place]),
                    context_length=spec.context_length,
                    accumulation_steps=int(candidates.num_micro_batches[place]),
                ),
                devices=used,
                step_time_s=Estimate(
                    value=seconds,
                    low=min(seconds, max(least, seconds * lows[place])),
                    high=seconds * highs[place],
                ),
                terms_s={name: values[place] for name, values in terms.items()},
                memory_bytes={name: values[place] for name, values in parts.items()},
                capacity_bytes=spec.memory_bytes,
                tokens_per_s=spec.tokens_per_step / seconds,
                outside=performance.outside(
                    one.layouts, spec.workload(one.micro_batch, one.num_micro_batches)
                ),
                mfu=None if peak_flops is None else flops / (seconds * used * peak_flops),
            )
        )
    return found


def layout_at(candidates: Candidates, place: int) -> ParallelLayout:
    """Returns the layout of the candidate at an index."""
    layouts = candidates.layouts
    return ParallelLayout(
        replicate=int(layouts.replicate[place]),
        shard=int(layouts.shard[place]),
        tensor=int(layouts.tensor[place]),
        pipeline=int(layouts.pipeline[place]),
        context=int(layouts.context[place]),
        expert=int(layouts.expert[place]),
        sharding=SHARDINGS[int(layouts.stage[place])],
        sequence_parallel=bool(layouts.sequence_parallel[place]),
        pipeline_interleave=int(layouts.pipeline_interleave[place]),
        activation_checkpointing=CHECKPOINTINGS[int(layouts.checkpointing[place])],
    )


def layout_name(layout: ParallelLayout, batch: BatchShape) -> str:
    """Returns a layout's short name, such as ``dp 8 (ZeRO-1) tp 8+sp pp 4x2 mb 1``."""
    stage = SHARDING_STAGES[layout.sharding]
    data = f"dp {layout.data_parallel}"
    if stage:
        replicas = f", {layout.replicate} replicas" if layout.replicate > 1 else ""
        data += f" (ZeRO-{stage}{replicas})"
    parts = [data]
    if layout.tensor > 1:
        parts.append(f"tp {layout.tensor}{'+sp' if layout.sequence_parallel else ''}")
    if layout.context > 1:
        parts.append(f"cp {layout.context}")
    if layout.expert > 1:
        parts.append(f"ep {layout.expert}")
    if layout.pipeline > 1:
        interleave = layout.pipeline_interleave
        parts.append(f"pp {layout.pipeline}{f'x{interleave}' if interleave > 1 else ''}")
    parts.append(f"mb {batch.num_sequences}")
    if layout.activation_checkpointing != "none":
        parts.append(f"{layout.activation_checkpointing} recompute")
    return " ".join(parts)
