"""Random training programs, each determined by its seed.

Programs vary the layers that each rank uses, which passes run under no_sync, second forward and
backward passes, activation checkpointing, rank weights, clipping, freezing, eval mode, how
gradients are cleared, and checkpoints that one number of ranks saves and another loads.
"""

import dataclasses
import random

NUM_BLOCKS = 4
_TRAINS_IN_EVAL = 0.15
"""Probability that a step trains in eval mode, which must not change the result."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """One micro-batch."""

    local: str
    """Which part runs under no_sync: "none", "forward", "backward", or "both"."""
    two_forwards: bool
    two_backwards: bool
    recomputes: bool
    used: tuple[frozenset[int], ...]
    """Blocks that the loss depends on, by rank."""
    weights: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The micro-batches of an optimizer step, and its settings."""

    passes: tuple[Pass, ...]
    frozen: frozenset[int]
    """Blocks that are frozen in this step."""
    freezes_in_eval: bool
    looks_in_eval: bool
    """Whether a forward pass in eval mode, without gradients, comes first."""
    trains_in_eval: bool
    max_norm: float | None
    zeroes: str
    """Whose zero_grad clears gradients: "container" or "optimizer"."""
    set_to_none: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A run. Its second half, if any, resumes from a checkpoint on another number of ranks."""

    bucket_size_mb: float
    halves: tuple[tuple[Step, ...], ...]
    num_ranks: tuple[int, ...]
    """Number of ranks in each half."""


def make_program(kind: str, seed: int, world_size: int) -> Program:
    """Returns the program of a seed."""
    draw = random.Random(f"{kind} {seed}")

    def make_pass(number: int, num_passes: int) -> Pass:
        is_last = number == num_passes - 1
        is_local = not is_last and draw.random() < 0.6
        twice = draw.random() < 0.25
        weighs = num_passes == 1 and not twice and draw.random() < 0.4
        return Pass(
            local=draw.choice(("forward", "backward", "both")) if is_local else "none",
            two_forwards=draw.random() < 0.25,
            two_backwards=twice,
            recomputes=draw.random() < 0.35,
            used=tuple(
                frozenset(number for number in range(NUM_BLOCKS) if draw.random() < 0.7)
                for _ in range(world_size)
            ),
            weights=tuple(draw.randint(0, 3) for _ in range(world_size)) if weighs else None,
        )

    def make_step() -> Step:
        num_passes = draw.choice((1, 1, 2, 3))
        frozen = frozenset(n for n in range(NUM_BLOCKS) if draw.random() < 0.2)
        return Step(
            passes=tuple(make_pass(number, num_passes) for number in range(num_passes)),
            frozen=frozen if draw.random() < 0.4 else frozenset(),
            freezes_in_eval=draw.random() < 0.5,
            looks_in_eval=draw.random() < 0.3,
            trains_in_eval=draw.random() < _TRAINS_IN_EVAL,
            max_norm=draw.choice((0.05, 1.0, 100.0)) if draw.random() < 0.5 else None,
            zeroes=draw.choice(("container", "optimizer")),
            set_to_none=draw.random() < 0.6,
        )

    others = draw.choice((1, world_size - 1))
    num_ranks = draw.choice(((world_size,), (world_size, others), (others, world_size)))
    return Program(
        bucket_size_mb=draw.choice((50, 200, 1000, 25e6)) / 2**20,
        halves=tuple(tuple(make_step() for _ in range(2)) for _ in num_ranks),
        num_ranks=num_ranks,
    )
