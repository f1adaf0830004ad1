"""Counts of a model shape: parameters by role, FLOPs per token, work by segment, pipeline stages.

Invariant, checked by tests: for every shape that `TransformerLM` builds, `ParameterCount.total`
equals the number of elements of its parameters, tied ones counted once.

In a mixture of experts a router sends each token to k of E experts, each a feed-forward layer of
width f and m matrices (three if gated). A shared expert processes all tokens. Compute depends on
the active parameters, so the `d_ff` of such a model's shape is the active width, averaged over its
L blocks. A block with experts has

    experts       m h f E weights, divided over the expert axis instead of the tensor axis
    router        h E weights, replicated on every rank
    all others    attention, norms, the shared expert: divided like those of a dense model

Each token uses m h f k of the expert weights. The shape's parameter count includes these and all
others. FLOPs are 6 per active weight. The router's FLOPs are ignored: they are less than 1% of a
block's. For states see `paceline.predict.cost.memory`, for activations
`paceline.predict.cost.activations`, for all-to-alls `paceline.predict.cost.communication`.

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

from paceline.core.errors import UsageError
from paceline.core.plan import ActivationCheckpointing
from paceline.core.specs import Experts, ModelShape, require_buildable

_FEED_FORWARD_MATRICES = {"swiglu": 3, "gelu": 2, "linear": 2}
_VECTORS_PER_NORM = {"rmsnorm": 1, "layernorm": 2, "none": 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters of a whole model, by role."""

    embedding: int
    """Token embedding, one row per vocabulary entry."""
    positions: int
    """Learned position embeddings; 0 with rotary positions."""
    attention: int
    """Weights of the query, key, value and output projections, all layers."""
    feed_forward: int
    """Weights of the feed-forward matrices, all layers."""
    biases: int
    """Biases of all layers; 0 without biases."""
    norms: int
    """Scales and shifts of all norms, and the shape's further parameters."""
    head: int
    """Weights of the output layer; 0 if tied to the embedding."""
    matmul: int
    """Weights that multiply every token: blocks and output layer, tied or not."""

    @property
    def total(self) -> int:
        """All parameters, tied ones counted once; without `matmul`, which overlaps other fields."""
        total: int = sum(dataclasses.astuple(self)) - self.matmul
        return total


def count_parameters(shape: ModelShape) -> ParameterCount:
    """Counts the parameters of a model of this `shape` exactly."""
    embedding = shape.vocab_size * shape.d_model
    width, num_matrices = shape.d_model, _FEED_FORWARD_MATRICES[shape.feed_forward]
    attention = shape.num_layers * block_attention_weights(shape)
    feed_forward = shape.num_layers * width * num_matrices * shape.d_ff
    num_norms = shape.num_layers * shape.block_norms + 1
    biases = (num_matrices - 1) * shape.d_ff + width
    if shape.has_attention:
        biases += shape.attention_width + 2 * shape.key_value_width + width
    return ParameterCount(
        embedding=embedding,
        positions=shape.max_context_length * width if shape.positions == "learned" else 0,
        attention=attention,
        feed_forward=feed_forward,
        biases=shape.num_layers * biases if shape.biases else 0,
        norms=num_norms * _VECTORS_PER_NORM[shape.norm] * width
        + shape.num_layers * shape.further_parameters,
        head=0 if shape.tied_embeddings else embedding,
        matmul=attention + feed_forward + embedding,
    )


def block_attention_weights(shape: ModelShape) -> int:
    """Returns the weights of one block's query, key, value and output projections."""
    if shape.attention_weights is not None:
        return shape.attention_weights
    return shape.d_model * 2 * (shape.attention_width + shape.key_value_width)


def block_parameters(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Returns rows and columns of every parameter of a `TransformerLM` block, in model order.

    Rows are a matrix's outputs, columns its inputs; a norm's scale has one column.
    """
    width, hidden = shape.d_model, shape.d_ff
    queries, keys = shape.attention_width, shape.key_value_width
    return {
        "attention_norm": (width, 1),
        "query": (queries, width),
        "key": (keys, width),
        "value": (keys, width),
        "output": (width, queries),
        "feed_forward_norm": (width, 1),
        "gate": (hidden, width),
        "up": (hidden, width),
        "down": (width, hidden),
    }


def expert_parameters(experts: Experts, shape: ModelShape) -> int:
    """Returns the number of parameters of one expert."""
    num_matrices = _FEED_FORWARD_MATRICES[shape.feed_forward]
    weights = num_matrices * shape.d_model * experts.width
    if not experts.biases:
        return weights
    return weights + (num_matrices - 1) * experts.width + shape.d_model


def inactive_parameters(experts: Experts, shape: ModelShape) -> int:
    """Returns the number of expert parameters that a token does not use, over all layers."""
    idle = experts.num_experts - experts.experts_per_token
    return expert_parameters(experts, shape) * idle * _num_layers(experts, shape)


def router_parameters(experts: Experts, shape: ModelShape) -> int:
    """Returns the number of parameters of one block's router."""
    return (shape.d_model + (1 if experts.biases else 0)) * experts.num_experts


def other_parameters(experts: Experts, shape: ModelShape) -> ParameterCount:
    """Counts the parameters of a model without routed experts and routers."""
    counted = count_parameters(shape)
    widths = experts.shared_width * _num_layers(experts, shape)
    widths += experts.dense_width * experts.num_dense_layers
    feed_forward = _FEED_FORWARD_MATRICES[shape.feed_forward] * shape.d_model * widths
    matmul = counted.matmul - counted.feed_forward + feed_forward
    return dataclasses.replace(counted, feed_forward=feed_forward, matmul=matmul)


def all_parameters(shape: ModelShape, experts: Experts | None) -> int:
    """Returns the number of parameters of a model, including every expert."""
    if experts is None:
        return count_parameters(shape).total
    routed = expert_parameters(experts, shape) * experts.num_experts
    block = routed + router_parameters(experts, shape)
    return other_parameters(experts, shape).total + block * _num_layers(experts, shape)


def _num_layers(experts: Experts, shape: ModelShape) -> int:
    """Returns the number of blocks with experts."""
    return shape.num_layers - experts.num_dense_layers


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
