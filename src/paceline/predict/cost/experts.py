"""Parameters and FLOPs of mixtures of experts.

A router sends each token to k of E experts, each a feed-forward layer of width f and m matrices
(three if gated). A shared expert processes all tokens. Compute depends on the active parameters, so
the `d_ff` of such a model's shape is the active width, averaged over its L blocks. A block with
experts has

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

from paceline.accounting.flops import flops_per_token
from paceline.accounting.parameters import ParameterCount, count_parameters
from paceline.core.specs import Experts as Experts
from paceline.core.specs import ModelShape


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


def model_flops_per_token(shape: ModelShape, experts: Experts | None, context_length: int) -> float:
    """Returns the model FLOPs per token, with full attention scores, without recomputation."""
    counted = flops_per_token(shape, context_length).model
    if experts is None or experts.attention_parameters is None:
        return counted
    attention = experts.attention_parameters * shape.num_layers
    return counted + 6 * (attention - count_parameters(shape).attention)


def _num_layers(experts: Experts, shape: ModelShape) -> Any:
    """Returns the number of blocks with experts."""
    return shape.num_layers - experts.num_dense_layers
