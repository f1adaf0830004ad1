"""The fastest layouts, exactly: every candidate is evaluated, and nothing is sampled or guessed.

Chunk by chunk: memory first, step time of what fits, and of that the best of every mesh (tensor,
context, pipeline and expert ranks; of our own trainer, of every ZeRO stage), so that the answer
shows different layouts and not variants of one.
What is kept does not grow with the number of candidates. Of layouts that take equally long the one
that holds less wins, then the one with fewer techniques.
"""

import dataclasses
import heapq
import time
from typing import Any

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.specs import BatchShape
from paceline.core.units import format_binary_bytes
from paceline.planner.cost.memory import layout_memory
from paceline.planner.cost.step_time import step_time
from paceline.planner.search.candidates import Array, Candidates, candidate_chunks, candidates_of
from paceline.planner.search.choice import Choice, choices, layout_at, layout_name
from paceline.planner.search.costs import Costs
from paceline.planner.search.meshes import meshes
from paceline.planner.search.question import SearchQuestion, describe_fixed

_TIE_DIGITS = 9


class NoLayoutError(UsageError):
    """No layout divides what it must, or none fits the memory of a device.

    Args:
        message: What is missing, and what would help.
        least_bytes: What the smallest layout holds, if there are any.
    """

    def __init__(self, message: str, least_bytes: float | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best of every mesh, the fastest first, and how many there were to choose from."""

    question: SearchQuestion
    costs: Costs
    choices: tuple[Choice, ...]
    num_candidates: int
    num_fitting: int
    elapsed_s: float

    @property
    def best(self) -> Choice:
        """The fastest."""
        return self.choices[0]


@dataclasses.dataclass(frozen=True)
class _Kept:
    """The best column of a mesh, ordered as layouts are chosen."""

    rank: tuple[float, ...]
    column: Array


def search(
    question: SearchQuestion, costs: Costs, *, top: int = 10, peak_flops: float | None = None
) -> SearchResult:
    """Evaluates every candidate and returns the fastest.

    Args:
        question: What is searched.
        costs: What devices and links reach.
        top: How many meshes are returned, at most.
        peak_flops: Stated FLOP/s of a device, for MFU.
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
    """Returns the fastest layout, or None where none divides or fits."""
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
    """Puts the best of every mesh of a chunk among those that are kept."""
    workload = question.workload(fitting.micro_batch, fitting.num_micro_batches)
    predicted = step_time(fitting.layouts, workload, costs.cluster, hidden=costs.hidden)
    seconds = np.broadcast_to(predicted.total_s, len(fitting))
    if len(kept) >= top:
        # What is slower than the last of those that will be shown can only be in the way.
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
    """Says why there is no layout, and what would make one."""
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
    """Says how many of the devices a layout could use."""
    fewer = dataclasses.replace(question, least_used=0.0)
    most = max((mesh.num_devices for mesh in meshes(fewer)), default=0)
    instead = "a batch and a number of devices that share more factors, such as powers of two"
    if not most:
        return f"give {instead}"
    return f"{most:,} devices would divide them; use that many, or {instead}"


def _remedy(question: SearchQuestion, more: float) -> str:
    """Says what would make the smallest layout fit."""
    larger = f"{more:.1f} times the memory" if more >= 2 else f"{more - 1:.0%} more memory"
    remedies = [f"devices with {larger}", "more devices"]
    if question.context_length > 8192:
        remedies.append("shorter sequences")
    return ", ".join(remedies[:-1]) + f" or {remedies[-1]} would help"
