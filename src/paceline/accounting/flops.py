"""Floating-point operations per token, the work of a step by segment, and pipeline stages.

A multiply and an add count as two operations. Every weight that multiplies a token costs 2 forward
and 4 backward (the gradients of input and weight), hence the well-known 6 N. Attention's two
matmuls cost 4 s per channel forward, where s is the context length. The first convention counts all
s keys for every query, as PaLM (Chowdhery et al. 2022, appendix B) and Megatron do; the second
counts only the half that a causal mask leaves visible. Norms, softmax, rotations and the optimizer
are not counted in either. Model FLOPs exclude recomputation, so recomputing lowers MFU; hardware
FLOPs (HFU) include it.

A segment is a part of `paceline.models.TransformerLM` whose parameter gradients become complete
together in backward. Its elementwise operations, eager in float32, read and write the following
numbers per token. d is `d_model`, a the total width of the query heads, k that of the key heads, f
`d_ff`, v the vocabulary size:

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

Rotations count with queries and keys; a residual sum counts with the branch that it adds. A
launched operator that only creates a view counts as a third of one.

With p ranks and v virtual stages on each, pipeline stage s of p v is on rank s mod p. A pipeline is
as fast as its slowest rank, so blocks are assigned one by one to the rank with the least work, in
matmul FLOPs plus 64 per element. One element takes as long as 25 to 75 matmul FLOPs on a CPU core,
by calibration, and about 600 on an H100 in bf16, by its data sheet: on GPUs the factor
underestimates elementwise work.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from paceline.accounting.parameters import block_parameters, count_parameters
from paceline.core.errors import UsageError
from paceline.core.plan import ActivationCheckpointing
from paceline.core.specs import Experts, ModelShape, require_buildable

AttentionConvention = Literal["full", "causal"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlopsPerToken:
    """Operations for one token of a sequence, averaged over its positions."""

    forward: float
    """FLOPs of the forward pass."""
    backward: float
    """FLOPs of the backward pass."""
    recomputation: float
    """FLOPs of recomputed activations; 0 without checkpointing."""

    @property
    def model(self) -> float:
        """FLOPs of forward and backward without recomputation, as MFU counts them."""
        return self.forward + self.backward

    @property
    def hardware(self) -> float:
        """All FLOPs executed, as HFU counts them."""
        return self.model + self.recomputation


def flops_per_token(
    shape: ModelShape,
    context_length: int,
    *,
    convention: AttentionConvention = "full",
    activation_checkpointing: ActivationCheckpointing = "none",
) -> FlopsPerToken:
    """Counts the FLOPs of training on one token.

    Args:
        shape: The model's dimensions.
        context_length: Tokens per sequence.
        convention: full counts all scores; causal counts only those that a mask leaves visible.
        activation_checkpointing: full if each block's activations are recomputed in backward.
    """
    parameters = count_parameters(shape)
    keys_per_query = context_length if convention == "full" else (context_length + 1) / 2
    attention = 4 * shape.num_layers * shape.attention_width * keys_per_query
    blocks = 2 * (parameters.attention + parameters.feed_forward) + attention
    forward = 2 * parameters.matmul + attention
    recomputed = {"none": 0.0, "selective": attention, "full": blocks}
    return FlopsPerToken(
        forward=forward, backward=2 * forward, recomputation=recomputed[activation_checkpointing]
    )


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


_FLOPS_PER_ELEMENT = 64


def divide_into_stages(
    shape: ModelShape, context_length: int, num_ranks: int, interleave: int = 1
) -> tuple[range, ...]:
    """Returns the blocks of every stage, in model order."""
    num_stages = num_ranks * interleave
    if shape.num_layers < num_stages:
        raise UsageError(
            f"pipeline {num_ranks} with interleave {interleave} needs {num_stages} blocks or more, "
            f"and the model has {shape.num_layers}; take fewer stages"
        )
    embedding, *blocks, norm, head = model_segments(shape)
    per_block = _work(shape, context_length, blocks) / shape.num_layers
    work = [per_block] * num_stages
    work[0] += _work(shape, context_length, [embedding])
    work[-1] += _work(shape, context_length, [norm, head])
    num_blocks = [1] * num_stages

    def load(stage: int) -> tuple[float, float, int]:
        # Ties go to the later stage, which keeps fewer micro-batches in flight.
        return sum(work[stage % num_ranks :: num_ranks]), work[stage], -stage

    for _ in range(shape.num_layers - num_stages):
        stage = min(range(num_stages), key=load)
        num_blocks[stage] += 1
        work[stage] += per_block
    ends = [sum(num_blocks[: stage + 1]) for stage in range(num_stages)]
    return tuple(range(end - number, end) for end, number in zip(ends, num_blocks, strict=True))


def _work(shape: ModelShape, context_length: int, segments: Sequence[ModelSegment]) -> float:
    """Returns the work of segments for one token, in FLOPs, forward and backward."""
    # A causal mask leaves half of the scores; each takes part in two matmuls.
    attention = 12 * shape.attention_width * (context_length + 1) / 2
    total = 0.0
    for segment in segments:
        total += sum(6 * linear.inputs * linear.outputs for linear in segment.linears)
        total += attention if segment.has_attention else 0
        total += _FLOPS_PER_ELEMENT * sum(segment.elements)
    return total


def model_flops_per_token(shape: ModelShape, experts: Experts | None, context_length: int) -> float:
    """Returns the model FLOPs per token, with full attention scores, without recomputation."""
    counted = flops_per_token(shape, context_length).model
    if experts is None or experts.attention_parameters is None:
        return counted
    attention = experts.attention_parameters * shape.num_layers
    return counted + 6 * (attention - count_parameters(shape).attention)
