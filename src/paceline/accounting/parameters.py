"""Parameter counts of a model shape, by role.

Invariant, checked by tests: for every shape that `TransformerLM` builds, `total` equals the number
of elements of its parameters, tied ones counted once.

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
"""

import dataclasses
from typing import Any

from paceline.core.specs import Experts, ModelShape

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
    """Scales and shifts of all norms."""
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
    attention = shape.num_layers * width * 2 * (shape.attention_width + shape.key_value_width)
    feed_forward = shape.num_layers * width * num_matrices * shape.d_ff
    num_norms = shape.num_layers * (2 if shape.has_attention else 1) + 1
    biases = (num_matrices - 1) * shape.d_ff + width
    if shape.has_attention:
        biases += shape.attention_width + 2 * shape.key_value_width + width
    return ParameterCount(
        embedding=embedding,
        positions=shape.max_context_length * width if shape.positions == "learned" else 0,
        attention=attention,
        feed_forward=feed_forward,
        biases=shape.num_layers * biases if shape.biases else 0,
        norms=num_norms * _VECTORS_PER_NORM[shape.norm] * width,
        head=0 if shape.tied_embeddings else embedding,
        matmul=attention + feed_forward + embedding,
    )


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


def expert_parameters(experts: Experts, shape: ModelShape) -> Any:
    """Returns the number of weights of one expert."""
    return (3 if shape.feed_forward == "swiglu" else 2) * shape.d_model * experts.width


def inactive_parameters(experts: Experts, shape: ModelShape) -> Any:
    """Returns the number of expert weights that a token does not use, over all layers."""
    idle = experts.num_experts - experts.experts_per_token
    return expert_parameters(experts, shape) * idle * _num_layers(experts, shape)


def router_parameters(experts: Experts, shape: ModelShape) -> Any:
    """Returns the number of weights of one block's router."""
    return shape.d_model * experts.num_experts


def other_parameters(experts: Experts, shape: ModelShape) -> ParameterCount:
    """Counts the parameters of a model without routed experts and routers."""
    counted = count_parameters(shape)
    active = expert_parameters(experts, shape) * experts.experts_per_token
    feed_forward = counted.feed_forward - active * _num_layers(experts, shape)
    attention = counted.attention
    if experts.attention_parameters is not None:
        attention = experts.attention_parameters * shape.num_layers
    matmul = counted.matmul - counted.attention - counted.feed_forward + attention + feed_forward
    return dataclasses.replace(
        counted, attention=attention, feed_forward=feed_forward, matmul=matmul
    )


def all_parameters(shape: ModelShape, experts: Experts | None) -> Any:
    """Returns the number of parameters of a model, including every expert."""
    if experts is None:
        return count_parameters(shape).total
    routed = expert_parameters(experts, shape) * experts.num_experts
    block = routed + router_parameters(experts, shape)
    return other_parameters(experts, shape).total + block * _num_layers(experts, shape)


def _num_layers(experts: Experts, shape: ModelShape) -> Any:
    """Returns the number of blocks with experts."""
    return shape.num_layers - experts.num_dense_layers
