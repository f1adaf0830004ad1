"""A decoder-only Transformer language model.

Token embedding, pre-norm blocks of causal attention and gated feed-forward, a final norm and
an output layer. The residual stream keeps the parameters' dtype; inside a block, autocast
may lower the precision of matmuls. Initialisation keeps the stream's scale independent of
width and depth: each matrix is scaled by its fan-in, and matrices that write to the stream
are smaller by sqrt(2 layers). The output layer is so small that the initial loss is close to
log(vocabulary).

A pipeline stage has consecutive blocks, with embedding or head at the ends. Its modules and
parameters keep their names from the whole model, such as
``blocks.3.attention.query.weight``. So the state dictionaries of all stages together are the
state dictionary of the model, regardless of how it was split.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
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
    """Attention, then feed-forward; each reads the normalised stream and adds to it."""

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
        shape: The dimensions; shapes that are supported for accounting only are rejected.
        attention: Implementation of attention: a backend of `flash_attention`, or naive.
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
        """Initialises weights and tables in place; call again after leaving the meta device."""
        shape = self.shape
        if shape.tied_embeddings:
            # Tied again on every call, because leaving the meta device unties the weights.
            self.head.weight = self.embedding.weight
        self.positions.reset_buffers()
        for weight, std in self.initial_weights():
            draw_weight(weight, std)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)

    def initial_weights(self) -> Iterator[tuple[Tensor, float]]:
        """Yields every matrix with its standard deviation, in drawing order."""
        # Drawn first: with tied embeddings, the output layer's smaller scale below then wins.
        yield self.embedding.weight, 1.0
        residual_scale = 1 / math.sqrt(2 * self.shape.num_layers)
        for module in self.modules():
            if isinstance(module, CausalSelfAttention):
                for linear in (module.query, module.key, module.value):
                    yield linear.weight, _std(linear)
                yield module.output.weight, residual_scale * _std(module.output)
            elif isinstance(module, SwiGLU):
                for linear in (module.gate, module.up):
                    yield linear.weight, _std(linear)
                yield module.down.weight, residual_scale * _std(module.down)
        yield self.head.weight, 0.5 * _std(self.head)

    def forward(
        self, tokens: Int[Tensor, "batch sequence"], caches: Sequence[LayerCache] | None = None
    ) -> Float[Tensor, "batch sequence vocabulary"]:
        """Returns the logits of the next token at every position.

        Args:
            tokens: Token ids below the vocabulary size.
            caches: One key-value cache per block for the sequence so far, which `tokens`
                continue: first the whole prompt, then one token at a time.
        """
        length = tokens.shape[-1] + (caches[0].length if caches else 0)
        if length > self.shape.max_context_length:
            raise ShapeError(
                f"a sequence of {length} tokens is longer than the model's "
                f"max_context_length {self.shape.max_context_length}"
            )
        x: Tensor = self.embedding(tokens)
        recompute = self.activation_checkpointing == "full" and torch.is_grad_enabled()
        x = run_blocks(self.blocks, x, self.positions, caches, recompute=recompute)
        logits: Tensor = self.head(self.final_norm(x))
        return logits

    def compile_blocks(self) -> None:
        """Compiles each block separately, in place.

        A model compiled as a whole computes all gradients in one graph, so no gradient can be
        communicated before the last one is ready. Compiled block by block, gradients arrive as
        in eager mode. Names of parameters and modules do not change.
        """
        for block in self.blocks:
            block.compile()


def run_blocks(
    blocks: Iterable[nn.Module],
    x: Float[Tensor, "batch sequence d_model"],
    positions: RotaryPositions,
    caches: Sequence[LayerCache] | None = None,
    *,
    recompute: bool = False,
) -> Float[Tensor, "batch sequence d_model"]:
    """Runs the blocks of a model or stage in order and returns the residual stream.

    `recompute` keeps only each block's input and recomputes the rest during backward.
    """
    for number, block in enumerate(blocks):
        if recompute:
            x = checkpoint(block, x, positions, use_reentrant=False)
        elif caches is not None:
            x = block(x, positions, caches[number])
        else:
            x = block(x, positions)
    return x


def next_token_loss(
    logits: Float[Tensor, "batch sequence vocabulary"], targets: Int[Tensor, "batch sequence"]
) -> Float[Tensor, ""]:
    """Returns the mean cross-entropy, computed in float32 for any dtype of the logits.

    Args:
        logits: Logits of every position.
        targets: The token that follows each position.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def draw_weight(weight: Tensor, std: float) -> None:
    """Fills a matrix from a normal distribution truncated at three standard deviations."""
    nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)


def _std(linear: nn.Linear) -> float:
    return 1 / math.sqrt(linear.in_features)


class TransformerStage(nn.Module):
    """Some blocks of a model; shares the model's modules, of which those outside can be freed.

    The first block includes the embedding, the last the head. `has_embedding` includes the
    embedding even without the first block: a tied head is stored under its name.
    """

    def __init__(
        self, model: TransformerLM, blocks: Sequence[int], *, has_embedding: bool = False
    ) -> None:
        super().__init__()
        is_last = model.shape.num_layers - 1 in blocks
        self.shape = model.shape
        self.activation_checkpointing = model.activation_checkpointing
        self.embedding = model.embedding if 0 in blocks or has_embedding else None
        self.positions = model.positions
        self.blocks = nn.ModuleList()
        for number in blocks:
            self.blocks.add_module(str(number), model.blocks[number])
        self.final_norm = model.final_norm if is_last else None
        self.head = model.head if is_last else None

    @property
    def max_context_length(self) -> int:
        """Longest sequence that the model accepts."""
        return self.shape.max_context_length

    def forward(self, x: Tensor) -> Float[Tensor, "batch sequence width"]:
        """Returns the residual stream after the stage's blocks, or the logits if it has the head.

        `x` are tokens if the stage has the embedding, otherwise the output of the previous stage.
        """
        if self.embedding is not None:
            x = self.embedding(x)
        recompute = self.activation_checkpointing == "full" and torch.is_grad_enabled()
        x = run_blocks(self.blocks, x, self.positions, recompute=recompute)
        if self.final_norm is None or self.head is None:
            return x
        logits: Tensor = self.head(self.final_norm(x))
        return logits

    def compile_blocks(self) -> None:
        """Compiles each block separately, in place."""
        for block in self.blocks:
            block.compile()
