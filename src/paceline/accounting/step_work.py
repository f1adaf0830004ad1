"""Compute of a training step by segment, in forward order.

A segment is a part of the model whose parameter gradients become complete together in backward. The
table lists the segments of `paceline.models.TransformerLM` with the numbers that their elementwise
operations read and write (passes over elements, per token), eager in float32. d is `d_model`, a the
total width of the query heads, k that of the key heads, f `d_ff`, v the vocabulary size:

    segment            matmuls             forward          backward
    embedding                              2d               2d, and the table; four times
                                                              the table if tied to the head
    norm (three kinds)                     7d               22d
    queries, keys,     d to a, d to k,     9(a + k)         12(a + k) + 6d, where the three
      values             d to k                               gradients are added
    attention, output  a to d, attention   2a + 3d          4a + 3d
    gate, up           d to f, twice       5f               9f + 3d
    down               f to d              3d               3d
    head and loss      d to v              3v               5v

Rotations count with queries and keys; a residual sum counts with the branch that it adds. A matmul
costs 2 FLOPs per weight and token forward, and 4 backward (the gradients of input and weight). A
launched operator that only creates a view counts as a third of one.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from paceline.accounting.parameters import block_parameters
from paceline.core.specs import ModelShape, require_buildable


class Linear(NamedTuple):
    """A matmul of every token with a weight."""

    inputs: int
    outputs: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSegment:
    """A part of the model whose parameter gradients become complete at the same time.

    Pairs hold the values of forward and backward.
    """

    parameter_sizes: tuple[int, ...]
    """Number of elements of each parameter, in model order."""
    elements: tuple[int, int]
    """Numbers that elementwise operations read and write per token."""
    launches: tuple[int, int]
    """Number of operators launched."""
    linears: tuple[Linear, ...] = ()
    has_attention: bool = False
    backward_fixed_elements: int = 0
    """Numbers that backward reads and writes, independent of the number of tokens."""


def model_segments(shape: ModelShape) -> tuple[ModelSegment, ...]:
    """Returns the segments of a model, in forward order."""
    require_buildable(shape)
    width, vocabulary = shape.d_model, shape.vocab_size
    table = vocabulary * width
    return (
        ModelSegment(
            parameter_sizes=(table,),
            elements=(2 * width, 2 * width),
            launches=(1, 1),
            # A table tied to the head adds up the gradients of both uses.
            backward_fixed_elements=(4 if shape.tied_embeddings else 1) * table,
        ),
        *(segment for _ in range(shape.num_layers) for segment in _block(shape)),
        _norm(width),
        ModelSegment(
            parameter_sizes=() if shape.tied_embeddings else (table,),
            linears=(Linear(inputs=width, outputs=vocabulary),),
            elements=(3 * vocabulary, 5 * vocabulary),
            launches=(4, 5),
        ),
    )


def _block(shape: ModelShape) -> Iterator[ModelSegment]:
    width, queries, keys = shape.d_model, shape.attention_width, shape.key_value_width
    hidden = shape.d_ff
    matrices = block_parameters(shape)

    def segment(*names: str, elements: tuple[int, int], launches: tuple[int, int]) -> ModelSegment:
        return ModelSegment(
            parameter_sizes=tuple(math.prod(matrices[name]) for name in names),
            linears=tuple(Linear(*reversed(matrices[name])) for name in names),
            has_attention="output" in names,
            elements=elements,
            launches=launches,
        )

    rotated = queries + keys
    yield _norm(width)
    joined = (9 * rotated, 12 * rotated + 6 * width)
    yield segment("query", "key", "value", elements=joined, launches=(26, 40))
    added = (2 * queries + 3 * width, 4 * queries + 3 * width)
    yield segment("output", elements=added, launches=(5, 8))
    yield _norm(width)
    yield segment("gate", "up", elements=(5 * hidden, 9 * hidden + 3 * width), launches=(6, 12))
    yield segment("down", elements=(3 * width, 3 * width), launches=(3, 4))


def _norm(width: int) -> ModelSegment:
    return ModelSegment(
        parameter_sizes=(width,), elements=(7 * width, 22 * width), launches=(6, 14)
    )
