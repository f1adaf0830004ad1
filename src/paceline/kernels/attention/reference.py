"""Attention by its formula: the reference for tests, and the naive case of the benchmarks.

It stores the whole s × s matrix of scores, which is the cost that FlashAttention avoids (Dao 2023).
Softmax is computed in float32 for every input dtype, except in float64 for float64.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.core.ranges import ATTENTION_SCORES, ATTENTION_SOFTMAX, ATTENTION_VALUES
from paceline.devices.named_range import named_range
from paceline.kernels.attention.layout import CausalAlign, causal_diagonal, default_scale


def attention_reference(
    query: Float[Tensor, "*batch queries head_dim"],
    key: Float[Tensor, "*batch keys head_dim"],
    value: Float[Tensor, "*batch keys value_dim"],
    *,
    causal: bool,
    scale: float | None = None,
    causal_align: CausalAlign = "top_left",
) -> Float[Tensor, "*batch queries value_dim"]:
    """Computes softmax(scale Q Kᵀ) V, with 1 / sqrt(d) as the usual scale.

    Args:
        query: (..., queries, head_dim).
        key: (..., keys, head_dim).
        value: (..., keys, value_dim).
        causal: Whether to apply a causal mask.
        scale: By default 1 / sqrt(head_dim).
        causal_align: Whether the mask aligns the first query and key, or the last ones.
    """
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    diagonal = causal_diagonal(num_queries, num_keys, causal=causal, align=causal_align)
    with named_range(ATTENTION_SCORES):
        scores = attention_scores(query, key, diagonal=diagonal, scale=scale)
    with named_range(ATTENTION_SOFTMAX):
        softmax_dtype = torch.promote_types(scores.dtype, torch.float32)
        if diagonal is None or diagonal >= 0:
            probabilities = torch.softmax(scores, dim=-1, dtype=softmax_dtype)
        else:
            # The first queries see nothing: a softmax over no scores would be 0 / 0.
            blind = torch.arange(num_queries, device=scores.device)[:, None] < -diagonal
            scores = scores.masked_fill(blind, 0.0)
            probabilities = torch.softmax(scores, dim=-1, dtype=softmax_dtype)
            probabilities = probabilities.masked_fill(blind, 0.0)
    with named_range(ATTENTION_VALUES):
        return probabilities.to(value.dtype) @ value


def attention_scores(
    query: Float[Tensor, "*batch queries head_dim"],
    key: Float[Tensor, "*batch keys head_dim"],
    *,
    diagonal: int | None,
    scale: float | None = None,
) -> Float[Tensor, "*batch queries keys"]:
    """Computes scale Q Kᵀ, with -inf where a key is hidden from a query."""
    scores = query @ key.transpose(-2, -1) * default_scale(query, scale)
    if diagonal is None:
        return scores
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(diagonal)
    return scores.masked_fill(~visible, float("-inf"))
