"""Floating-point operations per token, in the two conventions in use.

A multiply and an add count as two operations. Every weight that multiplies a token costs 2 forward
and 4 backward (the gradients of input and weight), hence the well-known 6 N. Attention's two
matmuls cost 4 s per channel forward, where s is the context length. The first convention counts all
s keys for every query, as PaLM (Chowdhery et al. 2022, appendix B) and Megatron do; the second
counts only the half that a causal mask leaves visible. Norms, softmax, rotations and the optimizer
are not counted in either.

Model FLOPs exclude recomputation, so recomputing lowers MFU; hardware FLOPs (HFU) include it.
"""

import dataclasses
from typing import Literal

from paceline.accounting.parameters import count_parameters
from paceline.core.plan import ActivationCheckpointing
from paceline.core.specs import ModelShape

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
