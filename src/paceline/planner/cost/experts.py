"""A mixture of experts: the parameters and FLOPs of its layers beside those of a dense model.

A router sends each token to k of E experts, each a feed-forward layer of width f and m matrices
(three if gated), beside a shared one that all tokens go through. A device multiplies with the
active parameters, so that the shape of such a model has the width of what is active, averaged over
its L blocks, as its `d_ff`. Of a block with experts,

    experts       m h f E weights, divided over the expert axis instead of the tensor axis
    router        h E weights, whole on every rank
    all others    attention, norms, the shared expert: divided like those of a dense model

and a token meets m h f k of the first: what the shape counts beyond all others. FLOPs are 6 for
each active weight; those of the router are left out, less than 1% of a block's. States are those
of `paceline.planner.cost.memory`, activations those of `paceline.planner.cost.activations`, and
`paceline.planner.cost.communication` has what experts send.
"""

import dataclasses
from typing import Any

from paceline.accounting.flops import flops_per_token
from paceline.accounting.parameters import ParameterCount, count_parameters
from paceline.core.specs import Experts as Experts
from paceline.core.specs import ModelShape


def expert_parameters(experts: Experts, shape: ModelShape) -> Any:
    """Returns the weights of one expert."""
    return (3 if shape.feed_forward == "swiglu" else 2) * shape.d_model * experts.width


def inactive_parameters(experts: Experts, shape: ModelShape) -> Any:
    """Returns the weights of all experts that a token does not meet, all layers together."""
    idle = experts.num_experts - experts.experts_per_token
    return expert_parameters(experts, shape) * idle * _num_layers(experts, shape)


def router_parameters(experts: Experts, shape: ModelShape) -> Any:
    """Returns the weights of one block's router."""
    return shape.d_model * experts.num_experts


def other_parameters(experts: Experts, shape: ModelShape) -> ParameterCount:
    """Counts the parameters of a model without experts that tokens are routed to, and routers."""
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
    """Returns all parameters of a model, those of every expert included."""
    if experts is None:
        return count_parameters(shape).total
    routed = expert_parameters(experts, shape) * experts.num_experts
    block = routed + router_parameters(experts, shape)
    return other_parameters(experts, shape).total + block * _num_layers(experts, shape)


def model_flops_per_token(shape: ModelShape, experts: Experts | None, context_length: int) -> float:
    """Returns the FLOPs of a token, all attention scores counted and nothing recomputed."""
    counted = flops_per_token(shape, context_length).model
    if experts is None or experts.attention_parameters is None:
        return counted
    attention = experts.attention_parameters * shape.num_layers
    return counted + 6 * (attention - count_parameters(shape).attention)


def _num_layers(experts: Experts, shape: ModelShape) -> Any:
    """Returns how many blocks have experts."""
    return shape.num_layers - experts.num_dense_layers
