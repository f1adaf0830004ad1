"""Conventions of all attention backends: inputs, memory layout of results, mask and scale.

Tensors are (batch, heads, sequence, head_dim). The output has the memory layout of the queries.
Gradients are stored token by token, the heads of a token adjacent, because the step before
attention splits the heads: with this order its backward copies nothing. Both match torch's fused
attention on CPUs.

The mask is one number, `diagonal`, as in torch.tril. Key j is visible to query i if
j <= i + diagonal; None hides nothing. A query that sees no key has output 0 and a log-sum-exp of
-inf.
"""

import dataclasses
import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.core.specs import require_choice

CausalAlign = Literal["top_left", "bottom_right"]


def causal_diagonal(
    num_queries: int, num_keys: int, *, causal: bool, align: CausalAlign
) -> int | None:
    """Returns the diagonal that aligns the first query and key, or the last; None without mask."""
    require_choice("attention", "causal_align", align, CausalAlign)
    if not causal:
        return None
    return 0 if align == "top_left" else num_keys - num_queries


def empty_output(query: Tensor) -> Tensor:
    """Allocates an output in the memory layout of the queries, but with contiguous head vectors."""
    if query.stride(-1) == 1:
        return torch.empty_like(query)
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def empty_lse(query: Tensor, backend: str) -> Tensor:
    """Allocates one number per query, (batch, heads, sequence).

    For torch's fused kernel the numbers of a token are adjacent; for the others, those of a head.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    batch, heads, sequence, _ = query.shape
    if backend == "sdpa":
        return query.new_empty((batch, sequence, heads), dtype=dtype).transpose(1, 2)
    return query.new_empty((batch, heads, sequence), dtype=dtype)


def empty_gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates (batch, heads, sequence, head_dim) each, with the heads of a token adjacent."""

    def like(tensor: Tensor) -> Tensor:
        batch, heads, sequence, head_dim = tensor.shape
        return tensor.new_empty((batch, sequence, heads, head_dim)).transpose(1, 2)

    return like(query), like(key), like(value)


def default_scale(query: Tensor, scale: float | None) -> float:
    """Returns the given scale, or 1 / sqrt(head_dim)."""
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


Results = tuple[Tensor, Tensor]
"""Output, and the log-sum-exp of each query's scores (lse)."""
Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of query, key and value."""


@dataclasses.dataclass  # Not frozen: that would add 3 µs to every call.
class ForwardInputs:
    """Inputs of forward."""

    query: Float[Tensor, "batch heads queries head_dim"]
    key: Float[Tensor, "batch kv_heads keys head_dim"]
    value: Float[Tensor, "batch kv_heads keys head_dim"]
    diagonal: int | None
    scale: float


@dataclasses.dataclass
class BackwardInputs(ForwardInputs):
    """Inputs of backward: forward's inputs, its results and their gradients."""

    output: Float[Tensor, "batch heads queries head_dim"]
    lse: Float[Tensor, "batch heads queries"]
    output_gradient: Float[Tensor, "batch heads queries head_dim"]
    lse_gradient: Float[Tensor, "batch heads queries"] | None
