"""A decoder-only Transformer language model.

Token embedding, pre-norm blocks of causal attention and gated feed-forward, a final norm and
an output layer. The residual stream keeps the parameters' dtype; inside a block, autocast
may lower the matrix multiplications. Initialisation keeps the stream's scale independent of
width and depth: each matrix by its fan-in, those that write to the stream smaller by
sqrt(2 layers), the output layer so small that the first loss is close to log(vocabulary).
"""

import math
from collections.abc import Sequence
from typing import Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.core.errors import ShapeError
from paceline.core.specs import AttentionImplementation, ModelShape, require_buildable
from paceline.models.layers import CausalSelfAttention, LayerCache, RMSNorm, RotaryPositions, SwiGLU


class TransformerBlock(nn.Module):
    """Attention, then feed-forward, each on a normed copy and added to the stream."""

    def __init__(self, shape: ModelShape, implementation: AttentionImplementation) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.d_model, shape.norm_epsilon)
        self.attention = CausalSelfAttention(shape, implementation)
        self.feed_forward_norm = RMSNorm(shape.d_model, shape.norm_epsilon)
        self.feed_forward = SwiGLU(shape.d_model, shape.d_ff)

    def forward(
        self,
        x: Float[Tensor, "batch sequence d_model"],
        positions: RotaryPositions,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "batch sequence d_model"]:
        """Adds both sub-layers to the residual stream."""
        x = x + self.attention(self.attention_norm(x), positions, cache)
        return cast(Tensor, x + self.feed_forward(self.feed_forward_norm(x)))


class TransformerLM(nn.Module):
    """A language model of a given shape.

    Args:
        shape: The dimensions; those that only exist to be accounted for are refused.
        attention: What computes attention: a backend of `flash_attention`, or naive.
        activation_checkpointing: full keeps only each block's input and recomputes the
            rest during backward.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        attention: AttentionImplementation = "auto",
        activation_checkpointing: Literal["none", "full"] = "none",
    ) -> None:
        super().__init__()
        require_buildable(shape)
        self.shape = shape
        self.activation_checkpointing = activation_checkpointing
        self.embedding = nn.Embedding(shape.vocab_size, shape.d_model)
        self.positions = RotaryPositions(
            shape.head_width, shape.max_context_length, shape.rope_theta
        )
        self.blocks = nn.ModuleList(
            TransformerBlock(shape, attention) for _ in range(shape.num_layers)
        )
        self.final_norm = RMSNorm(shape.d_model, shape.norm_epsilon)
        self.head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
        self.reset_parameters()

    @property
    def max_context_length(self) -> int:
        """Longest sequence that the model accepts."""
        return self.shape.max_context_length

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises weights and tables in place; needed after leaving the meta device."""
        shape = self.shape
        if shape.tied_embeddings:
            # Here and not only at first: leaving the meta device unties what was tied.
            self.head.weight = self.embedding.weight
        self.positions.reset_buffers()
        # Drawn first: when tied, the output layer's smaller scale below is the one that counts.
        nn.init.trunc_normal_(self.embedding.weight, std=1.0, a=-3.0, b=3.0)
        residual_scale = 1 / math.sqrt(2 * shape.num_layers)
        for module in self.modules():
            if isinstance(module, CausalSelfAttention):
                for linear in (module.query, module.key, module.value):
                    _initialize(linear)
                _initialize(module.output, residual_scale)
            elif isinstance(module, SwiGLU):
                _initialize(module.gate)
                _initialize(module.up)
                _initialize(module.down, residual_scale)
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
        _initialize(self.head, scale=0.5)

    def forward(
        self, tokens: Int[Tensor, "batch sequence"], caches: Sequence[LayerCache] | None = None
    ) -> Float[Tensor, "batch sequence vocabulary"]:
        """Returns the logits of the next token at every position.

        Args:
            tokens: Numbers below the vocabulary's size.
            caches: Of each block, the keys and values of the sequence so far, which `tokens`
                continue: the whole beginning first, then one token at a time.
        """
        length = tokens.shape[-1] + (caches[0].length if caches else 0)
        if length > self.shape.max_context_length:
            raise ShapeError(
                f"a sequence of {length} tokens is longer than the model's "
                f"max_context_length {self.shape.max_context_length}"
            )
        x: Tensor = self.embedding(tokens)
        recompute = self.activation_checkpointing == "full" and torch.is_grad_enabled()
        for number, block in enumerate(self.blocks):
            if recompute:
                x = checkpoint(block, x, self.positions, use_reentrant=False)
            elif caches is not None:
                x = block(x, self.positions, caches[number])
            else:
                x = block(x, self.positions)
        logits: Tensor = self.head(self.final_norm(x))
        return logits

    def compile_blocks(self) -> None:
        """Compiles every block on its own, in place.

        A whole compiled model computes all gradients in one piece, so that nothing can be
        communicated before the last is ready; block by block, gradients arrive as in eager
        mode. Names of parameters and modules stay as they are.
        """
        for block in self.blocks:
            block.compile()


def next_token_loss(
    logits: Float[Tensor, "batch sequence vocabulary"], targets: Int[Tensor, "batch sequence"]
) -> Float[Tensor, ""]:
    """Returns the mean cross-entropy in float32, whatever dtype the logits have.

    Args:
        logits: Of every position.
        targets: The token that follows each.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _initialize(linear: nn.Linear, scale: float = 1.0) -> None:
    std = scale / math.sqrt(linear.in_features)
    nn.init.trunc_normal_(linear.weight, std=std, a=-3 * std, b=3 * std)
