"""What a training step computes, segment by segment, in the order of the forward pass.

A segment is what backward does in one go before the gradients of its parameters are complete. The
segments of `paceline.models.TransformerLM`, with the numbers that its elementwise operations read
and write (passes over elements, per token), eager in float32. d is `d_model`, a the width of all
query heads, k that of all key heads, f `d_ff`, v the vocabulary:

    segment              products            forward          backward
    embedding                              2d               2d, and the table; four times
                                                              if it is the head's, too
    norm (three kinds)                     7d               22d
    queries, keys,     d to a, d to k,     9(a + k)         12(a + k) + 6d, where the three
      values             d to k                               meet again
    attention, output  a to d, attention   2a + 3d          4a + 3d
    gate, up           d to f, twice       5f               9f + 3d
    down               f to d              3d               3d
    head and loss      d to v              3v               5v

Rotations are part of queries and keys, the residual sums of what is added. A product costs 2
operations per weight and token forward and 4 backward, the gradients of input and weight. Of the
operators that are called, those that only make a view count a third.
"""

import dataclasses
from collections.abc import Iterator

from paceline.accounting.parameters import block_parameters
from paceline.core.specs import ModelShape, require_buildable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """A product of every token with a matrix."""

    inputs: int
    outputs: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSegment:
    """Work of the model whose parameters' gradients are complete at the same time."""

    parameter_sizes: tuple[int, ...]
    """Elements of its parameters, in the order of the model's."""
    linears: tuple[Linear, ...] = ()
    has_attention: bool = False
    forward_elements: int = 0
    """Numbers that elementwise operations read and write per token."""
    backward_elements: int = 0
    backward_fixed_elements: int = 0
    """The same, whatever the number of tokens."""
    forward_calls: int = 0
    """Operators that are called."""
    backward_calls: int = 0


def model_segments(shape: ModelShape) -> tuple[ModelSegment, ...]:
    """Returns the segments of a model in the order of the forward pass."""
    require_buildable(shape)
    width, vocabulary = shape.d_model, shape.vocab_size
    table = vocabulary * width
    head = Linear(inputs=width, outputs=vocabulary)
    return (
        ModelSegment(
            parameter_sizes=(table,),
            forward_elements=2 * width,
            backward_elements=2 * width,
            # A table that is also the head's has the gradients of both uses added.
            backward_fixed_elements=(4 if shape.tied_embeddings else 1) * table,
            forward_calls=1,
            backward_calls=1,
        ),
        *(segment for _ in range(shape.num_layers) for segment in _block(shape)),
        _norm(width),
        ModelSegment(
            parameter_sizes=() if shape.tied_embeddings else (table,),
            linears=(head,),
            forward_elements=3 * vocabulary,
            backward_elements=5 * vocabulary,
            forward_calls=4,
            backward_calls=5,
        ),
    )


def _block(shape: ModelShape) -> Iterator[ModelSegment]:
    width, queries, keys = shape.d_model, shape.attention_width, shape.key_value_width
    hidden = shape.d_ff
    matrices = {
        name: Linear(inputs=columns, outputs=rows)
        for name, (rows, columns) in block_parameters(shape).items()
    }
    yield _norm(width)
    yield _segment(
        *(matrices[name] for name in ("query", "key", "value")),
        forward_elements=9 * (queries + keys),
        backward_elements=12 * (queries + keys) + 6 * width,
        forward_calls=26,
        backward_calls=40,
    )
    yield _segment(
        matrices["output"],
        has_attention=True,
        forward_elements=2 * queries + 3 * width,
        backward_elements=4 * queries + 3 * width,
        forward_calls=5,
        backward_calls=8,
    )
    yield _norm(width)
    yield _segment(
        *(matrices[name] for name in ("gate", "up")),
        forward_elements=5 * hidden,
        backward_elements=9 * hidden + 3 * width,
        forward_calls=6,
        backward_calls=12,
    )
    yield _segment(
        matrices["down"],
        forward_elements=3 * width,
        backward_elements=3 * width,
        forward_calls=3,
        backward_calls=4,
    )


def _segment(
    *linears: Linear,
    forward_elements: int,
    backward_elements: int,
    forward_calls: int,
    backward_calls: int,
    has_attention: bool = False,
) -> ModelSegment:
    """Returns a segment whose parameters are the matrices of its products."""
    return ModelSegment(
        parameter_sizes=tuple(linear.inputs * linear.outputs for linear in linears),
        linears=linears,
        has_attention=has_attention,
        forward_elements=forward_elements,
        backward_elements=backward_elements,
        forward_calls=forward_calls,
        backward_calls=backward_calls,
    )


def _norm(width: int) -> ModelSegment:
    return ModelSegment(
        parameter_sizes=(width,),
        forward_elements=7 * width,
        backward_elements=22 * width,
        forward_calls=6,
        backward_calls=14,
    )
