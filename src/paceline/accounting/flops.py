"""Floating-point operations per token, in the two conventions in use.

A multiply and an add count as two operations. Every weight that a token meets costs 2
forward and 4 backward (the gradient of the input and of the weight), hence the well-known
6 N. Attention's two matmuls cost 4 s per channel forward, where s is
the context length. The first convention counts all s keys for every query, as PaLM (Chowdhery
et al. 2022, appendix B) and Megatron do; the second counts only the half that a causal mask
leaves. Norms, softmax, rotations and the optimizer are not counted in either.

Model FLOPs leave recomputation out, so that MFU rewards not doing it; hardware FLOPs (HFU)
include it.
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
    """Of the forward pass."""
    backward: float
    """Of the backward pass."""
    recomputation: float
    """Of activations that are computed a second time; 0 without checkpointing."""

    @property
    def model(self) -> float:
        """Forward and backward, nothing recomputed: what MFU counts."""
        return self.forward + self.backward

    @property
    def hardware(self) -> float:
        """Everything that is executed: what HFU counts."""
        return self.model + self.recomputation


def flops_per_token(
    shape: ModelShape,
    context_length: int,
    *,
    convention: AttentionConvention = "full",
    activation_checkpointing: ActivationCheckpointing = "none",
) -> FlopsPerToken:
    """Counts the operations that training on one token takes.

    Args:
        shape: The model's dimensions.
        context_length: Tokens of a sequence.
        convention: full counts all scores, causal the half that a mask leaves.
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
