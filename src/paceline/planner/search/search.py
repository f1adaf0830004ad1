"""Exhaustive search for the fastest layouts: every candidate is evaluated, without sampling.

Each chunk is processed in three steps: compute memory, compute the step time of candidates that
fit, and keep the best candidate of every mesh (tensor, context, pipeline and expert ranks). The
result thus contains different meshes instead of variants of one. Memory use does not grow with the
number of candidates. Ties in step time are broken by lower memory, then by fewer techniques.
"""

import dataclasses
import heapq
import time
from typing import Any

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.specs import BatchShape
from paceline.core.units import format_binary_bytes
from paceline.planner.search.candidates import (
    Array,
    Candidates,
    candidate_chunks,
    candidates_of,
    meshes,
)
from paceline.planner.search.choice import Choice, choices, layout_at, layout_name
from paceline.planner.search.spec import Costs, SearchQuestion, describe_fixed
from paceline.predict.cost.memory import layout_memory
from paceline.predict.cost.step_time import step_time

_TIE_DIGITS = 9


class NoLayoutError(UsageError):
    """Raised if no layout divides the work, or none fits the memory of a device.

    Args:
        message: The cause, and possible remedies.
        least_bytes: Peak memory of the smallest layout; None if there is no layout.
    """

    def __init__(self, message: str, least_bytes: float | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best layout of each mesh, fastest first, with candidate counts."""

    question: SearchQuestion
    costs: Costs
    choices: tuple[Choice, ...]
    num_candidates: int
    num_fitting: int
    elapsed_s: float

    @property
    def best(self) -> Choice:
        """The fastest layout."""
        return self.choices[0]


@dataclasses.dataclass(frozen=True)
class _Kept:
    """The best candidate of a mesh, with its sort key."""

    rank: tuple[float, ...]
    column: Array


def search(
    question: SearchQuestion, costs: Costs, *, top: int = 10, peak_flops: float | None = None
) -> SearchResult:
    """Evaluates every candidate and returns the fastest.

    Args:
        question: The search question.
        costs: Achieved rates of devices and links.
        top: Maximum number of meshes to return.
        peak_flops: Stated peak FLOP/s of a device, for MFU.
    """
    began = time.perf_counter()
    kept: dict[tuple[int, ...], _Kept] = {}
    num_candidates = num_fitting = 0
    smallest: tuple[float, Array] | None = None
    for chunk in candidate_chunks(question):
        num_candidates += len(chunk)
        workload = question.workload(chunk.micro_batch, chunk.num_micro_batches)
        memory = np.broadcast_to(layout_memory(chunk.layouts, workload).total, len(chunk))
        fits = memory <= question.memory_bytes
        if not fits.any():
            place = int(np.argmin(memory))
            if smallest is None or memory[place] < smallest[0]:
                smallest = float(memory[place]), chunk.columns[:, place]
            continue
        num_fitting += int(fits.sum())
        _keep(kept, chunk.take(fits), memory[fits], question, costs, top)
    if not kept:
        _raise_none(question, num_candidates, smallest)
    best = heapq.nsmallest(top, kept.values(), key=lambda each: each.rank)
    found = candidates_of(np.stack([each.column for each in best], axis=1), question)
    return SearchResult(
        question=question,
        costs=costs,
        choices=tuple(choices(found, question, costs, peak_flops)),
        num_candidates=num_candidates,
        num_fitting=num_fitting,
        elapsed_s=time.perf_counter() - began,
    )


def find_best(
    question: SearchQuestion, costs: Costs, peak_flops: float | None = None
) -> Choice | None:
    """Returns the fastest layout, or None if none divides the work or fits."""
    try:
        return search(question, costs, top=1, peak_flops=peak_flops).best
    except NoLayoutError:
        return None


def _keep(
    kept: dict[tuple[int, ...], _Kept],
    fitting: Candidates,
    memory: Array,
    question: SearchQuestion,
    costs: Costs,
    top: int,
) -> None:
    """Updates the kept candidates with the best of every mesh in a chunk."""
    workload = question.workload(fitting.micro_batch, fitting.num_micro_batches)
    predicted = step_time(fitting.layouts, workload, costs.cluster, hidden=costs.hidden)
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
        *(layouts.sequence_parallel, layouts.shard),
        *(() if question.experts is None else (layouts.expert,)),
    )
    order = np.lexsort((*reversed(techniques), rounded))
    columns = fitting.columns
    shown = [layouts.tensor, layouts.context, layouts.pipeline]
    shown += [] if question.experts is None else [layouts.expert]
    kinds = np.stack(shown)[:, order]
    _, firsts = np.unique(kinds, axis=1, return_index=True)
    for first in firsts:
        place = int(order[first])
        rank: tuple[Any, ...] = (rounded[place], *(float(each[place]) for each in techniques))
        kind = tuple(int(size) for size in kinds[:, first])
        if kind not in kept or rank < kept[kind].rank:
            kept[kind] = _Kept(rank, columns[:, place])


def _raise_none(
    question: SearchQuestion, num_candidates: int, smallest: tuple[float, Array] | None
) -> None:
    """Raises an error with the reason why there is no layout, and remedies."""
    given = f" with {describe_fixed(question.fixed)}" if question.fixed else ""
    heads = f"{question.shape.num_heads} heads"
    if question.experts is not None:
        heads += f", {question.experts.num_experts} experts"
    if smallest is None:
        raise NoLayoutError(
            f"no layout of {question.num_devices:,} devices{given} divides "
            f"{question.global_batch:,} sequences of {question.context_length:,} tokens, "
            f"{question.shape.num_layers} layers and {heads}; "
            f"{_divisible(question)}"
        )
    least_bytes, column = smallest
    tightest = _name_of(column, question)
    more = least_bytes / question.memory_bytes
    raise NoLayoutError(
        f"none of {num_candidates:,} layouts{given} fits: the smallest ({tightest}) needs "
        f"{format_binary_bytes(least_bytes)} per device, which has "
        f"{format_binary_bytes(question.memory_bytes)}; {_remedy(question, more)}",
        least_bytes,
    )


def _name_of(column: Array, question: SearchQuestion) -> str:
    """Returns the short name of the layout in a column."""
    one = candidates_of(column[:, None], question)
    batch = BatchShape(num_sequences=int(one.micro_batch[0]), context_length=1)
    return layout_name(layout_at(one, 0), batch)


def _divisible(question: SearchQuestion) -> str:
    """Returns advice with the largest number of devices that a layout could use."""
    fewer = dataclasses.replace(question, least_used=0.0)
    most = max((mesh.num_devices for mesh in meshes(fewer)), default=0)
    instead = "a batch and a number of devices that share more factors, such as powers of two"
    if not most:
        return f"give {instead}"
    return f"{most:,} devices would divide them; use that many, or {instead}"


def _remedy(question: SearchQuestion, more: float) -> str:
    """Returns advice on making the smallest layout fit."""
    larger = f"{more:.1f} times the memory" if more >= 2 else f"{more - 1:.0%} more memory"
    remedies = [f"devices with {larger}", "more devices"]
    if question.context_length > 8192:
        remedies.append("shorter sequences")
    return ", ".join(remedies[:-1]) + f" or {remedies[-1]} would help"
