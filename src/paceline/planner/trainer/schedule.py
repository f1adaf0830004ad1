"""Micro-batches in flight on a pipeline rank at each backward pass.

Models torch's schedules for rank r of p ranks with v stages each and m micro-batches. The warm-up
is p - 1 - r forwards, or (v - 1) p + 2 (p - 1 - r) if ranks have several stages. Then forwards and
backwards alternate until only backwards remain. Micro-batches go through a rank's stages in groups
of p, forward from the first stage and backward from the last.
"""

import dataclasses
from collections.abc import Iterator

from paceline.core.plan import ParallelLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardPass:
    """Backward pass of one micro-batch through one stage of a rank."""

    stage: int
    """Index among the rank's stages, from 0."""
    in_flight: tuple[int, ...]
    """Micro-batches that each of the rank's stages keeps for backward, including this one."""
    done: frozenset[int]
    """Stages of the rank that already hold gradients from an earlier micro-batch."""


def backward_passes(
    layout: ParallelLayout, rank: int, num_micro_batches: int
) -> Iterator[BackwardPass]:
    """Yields the backward passes of one step in order.

    Args:
        layout: The layout. Its pipeline may have a single rank.
        rank: Rank in the pipeline.
        num_micro_batches: Micro-batches per step.
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
