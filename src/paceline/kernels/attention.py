"""The attention that the model calls, by the name of what computes it."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from paceline.core.specs import AttentionImplementation
from paceline.kernels.attention_reference import attention_reference


def attention(
    query: Float[Tensor, "batch heads sequence head_dim"],
    key: Float[Tensor, "batch kv_heads sequence head_dim"],
    value: Float[Tensor, "batch kv_heads sequence head_dim"],
    *,
    causal: bool,
    implementation: AttentionImplementation,
) -> Float[Tensor, "batch heads sequence head_dim"]:
    """Computes attention; with fewer key-value heads than heads, each serves a group.

    sdpa is torch's fused kernel, whose memory grows linearly with the sequence; naive stores
    the scores. Both take softmax in float32.
    """
    grouped = query.shape[1] != key.shape[1]
    if implementation == "sdpa":
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, enable_gqa=grouped
        )
    if grouped:
        group = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(group, dim=1)
        value = value.repeat_interleave(group, dim=1)
    return attention_reference(query, key, value, causal=causal)
