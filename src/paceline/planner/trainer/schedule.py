"""Which micro-batches a rank of a pipeline has in flight whenever one goes backward.

torch's schedules, for rank r of p with v stages each and m micro-batches: p - 1 - r forwards come
first, or (v - 1) p + 2 (p - 1 - r) where ranks have several stages; then forwards and backwards in
turn, until only backwards are left. Micro-batches go through a rank's stages p at a time, forward
from the first stage and backward from the last.
"""

import dataclasses
from collections.abc import Iterator

from paceline.core.plan import ParallelLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardPass:
    """One micro-batch going backward through one stage of a rank."""

    stage: int
    """Which of the rank's stages it is, the first is 0."""
    in_flight: tuple[int, ...]
    """Micro-batches that each of the rank's stages keeps for backward, with this one."""
    done: frozenset[int]
    """Stages of the rank that an earlier micro-batch has left gradients in."""


def backward_passes(
    layout: ParallelLayout, rank: int, num_micro_batches: int
) -> Iterator[BackwardPass]:
    """Yields the backward passes of one step, in their order.

    Args:
        layout: Its pipeline may be of one rank.
        rank: Of the pipeline.
        num_micro_batches: Of one step.
    """
    ranks, parts = layout.pipeline, layout.pipeline_interleave
    num_passes = num_micro_batches * parts
    later = ranks - 1 - rank
    ahead = later if parts == 1 else (parts - 1) * ranks + 2 * later
    in_flight = [0] * parts
    done: set[int] = set()
    forwards = 0
    for number in range(num_passes):
        while forwards < min(num_passes, number + ahead + 1):
            in_flight[forwards // ranks % parts] += 1
            forwards += 1
        stage = parts - 1 - number // ranks % parts
        yield BackwardPass(stage=stage, in_flight=tuple(in_flight), done=frozenset(done))
        in_flight[stage] -= 1
        done.add(stage)
