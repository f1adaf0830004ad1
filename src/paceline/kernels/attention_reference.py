"""Attention as its formula says: the oracle, and the naive case of the benchmarks.

It stores the whole s × s matrix of scores, which is the cost that FlashAttention avoids
(Dao 2023). Softmax is taken in float32 whatever the inputs are, or in float64 for float64.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.core.ranges import ATTENTION_SCORES, ATTENTION_SOFTMAX, ATTENTION_VALUES
from paceline.kernels.named_range import named_range


def attention_reference(
    query: Float[Tensor, "*batch queries head_dim"],
    key: Float[Tensor, "*batch keys head_dim"],
    value: Float[Tensor, "*batch keys value_dim"],
    *,
    causal: bool,
) -> Float[Tensor, "*batch queries value_dim"]:
    """Computes softmax(Q Kᵀ / sqrt(d)) V; causal masks align at the first query and key."""
    with named_range(ATTENTION_SCORES):
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        if causal:
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~visible, float("-inf"))
    with named_range(ATTENTION_SOFTMAX):
        softmax_dtype = torch.promote_types(scores.dtype, torch.float32)
        probabilities = torch.softmax(scores, dim=-1, dtype=softmax_dtype)
    with named_range(ATTENTION_VALUES):
        return probabilities.to(value.dtype) @ value
