"""Specifications of a training workload: model shape, batch shape and dtypes.

All three are frozen, hold only plain values, and describe a model of 10^12 parameters as well
as one of 10^4. They are validated once, on construction, so that functions can rely on them.
"""

import dataclasses
from typing import Any, Literal, get_args

from paceline.core.errors import ShapeError, UsageError

Phase = Literal["forward", "forward-backward", "train"]
AttentionImplementation = Literal["auto", "sdpa", "tiled", "triton", "naive"]
AttentionKind = Literal["naive", "tiled", "sdpa", "triton"]
"""The implementation that runs on a device once `auto` is resolved."""
DType = Literal["float64", "float32", "tfloat32", "bfloat16", "float16", "float8"]
FeedForward = Literal["swiglu", "gelu", "linear"]
Norm = Literal["rmsnorm", "layernorm", "none"]
Positions = Literal["rotary", "learned", "none"]

# tfloat32 is a way to multiply float32 numbers, so it takes the same storage.
_BYTES_PER_ELEMENT: dict[DType, int] = {
    "float64": 8,
    "float32": 4,
    "tfloat32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
}


def bytes_per_element(dtype: DType) -> int:
    """Returns the storage size of one element in bytes."""
    return _BYTES_PER_ELEMENT[dtype]


def require_choice(owner: str, field: str, value: str, choices: object) -> None:
    """Raises a `ShapeError` that names the field if a value is not one of a literal's choices."""
    if value not in get_args(choices):
        names = ", ".join(get_args(choices))
        raise ShapeError(f"{owner}.{field} is {value!r}; it must be one of {names}")


def require_at_least(owner: object, minimum: int, *fields: str) -> None:
    """Raises a `ShapeError` that names the first field below a minimum; None is ignored."""
    for field in fields:
        value = getattr(owner, field)
        if value is not None and value < minimum:
            name = type(owner).__name__
            raise ShapeError(f"{name}.{field} is {value}; it must be at least {minimum}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The dimensions of a decoder-only Transformer.

    The defaults describe the model that `paceline.models.TransformerLM` builds: pre-norm
    blocks, rotary positions, a gated feed-forward, no biases. The other settings are for
    accounting only: of published models and of the course's simplified ones.
    """

    vocab_size: int
    """Rows of the embedding and of the output layer; 0 for a model without either."""
    d_model: int
    """Width of the residual stream."""
    d_ff: int
    """Width of the feed-forward layer's hidden activations."""
    num_layers: int
    """Number of blocks."""
    num_heads: int
    """Query heads per attention layer; 0 for a model without attention."""
    num_kv_heads: int | None = None
    """Key and value heads (grouped-query attention); None for as many as `num_heads`."""
    head_dim: int | None = None
    """Width of one head; None for `d_model / num_heads`."""
    max_context_length: int = 2048
    """Longest sequence that the model accepts."""
    feed_forward: FeedForward = "swiglu"
    """swiglu has three matrices, gelu and linear have two."""
    norm: Norm = "rmsnorm"
    """rmsnorm has a scale, layernorm a scale and a shift."""
    positions: Positions = "rotary"
    """learned positions are parameters, rotary ones are not."""
    biases: bool = False
    """Whether the linear layers of the blocks have biases."""
    norms_per_block: int | None = None
    """Norms of the width of the residual stream in one block; None for one before each branch."""
    further_parameters: int = 0
    """Parameters of one block in vectors that `norm` and `biases` do not imply: norms of heads,
    biases of some of the matrices, attention sinks."""
    attention_weights: int | None = None
    """Weights of one block's attention matrices if the heads do not imply them (latent
    attention)."""
    tied_embeddings: bool = False
    """Whether the output layer reuses the embedding's weights."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    norm_epsilon: float = 1e-5
    """Added to the mean square before the square root."""

    def __post_init__(self) -> None:
        require_choice("ModelShape", "feed_forward", self.feed_forward, FeedForward)
        require_choice("ModelShape", "norm", self.norm, Norm)
        require_choice("ModelShape", "positions", self.positions, Positions)
        require_at_least(self, 1, "d_model", "d_ff", "num_layers", "max_context_length")
        require_at_least(self, 0, "vocab_size", "num_heads", "norms_per_block")
        require_at_least(self, 0, "further_parameters", "attention_weights")
        if self.num_heads > 0:
            self._validate_heads()
        if self.rope_theta <= 0 or self.norm_epsilon <= 0:
            raise ShapeError("ModelShape.rope_theta and norm_epsilon must be positive")

    def _validate_heads(self) -> None:
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ShapeError(
                f"ModelShape.d_model {self.d_model} is not divisible by num_heads "
                f"{self.num_heads}; change one of them or give head_dim"
            )
        require_at_least(self, 1, "num_kv_heads", "head_dim")
        if self.num_heads % self.key_value_heads:
            raise ShapeError(
                f"ModelShape.num_heads {self.num_heads} is not a multiple of num_kv_heads "
                f"{self.key_value_heads}; each key-value head serves an equal number of query "
                "heads"
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise ShapeError(
                "ModelShape: rotary position embeddings rotate pairs of channels, so the head "
                f"dimension {self.head_width} must be even"
            )

    @property
    def has_attention(self) -> bool:
        """Whether blocks have attention in addition to their feed-forward layer."""
        return self.num_heads > 0

    @property
    def block_norms(self) -> int:
        """Number of norms of the width of the residual stream in one block."""
        if self.norm == "none":
            return 0
        if self.norms_per_block is not None:
            return self.norms_per_block
        return 2 if self.has_attention else 1

    @property
    def head_width(self) -> int:
        """Width of one head: `head_dim` if given, otherwise derived."""
        if self.head_dim is not None:
            return self.head_dim
        return self.d_model // self.num_heads if self.num_heads else 0

    @property
    def key_value_heads(self) -> int:
        """Number of key and value heads: `num_kv_heads` if given, otherwise `num_heads`."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def attention_width(self) -> int:
        """Total width of all query heads."""
        return self.num_heads * self.head_width

    @property
    def key_value_width(self) -> int:
        """Total width of all key heads, which equals that of all value heads."""
        return self.key_value_heads * self.head_width


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts that replace a block's feed-forward layer in a mixture of experts."""

    num_experts: int
    experts_per_token: int
    width: int
    """Width of one expert's hidden activations."""
    shared_width: int = 0
    """Width of the shared expert, which processes every token."""
    num_dense_layers: int = 0
    """Blocks that have an ordinary feed-forward layer instead."""
    dense_width: int = 0
    """Width of that ordinary layer; 0 if no block has one."""
    biases: bool = False
    """Whether the experts' matrices and the router have biases."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "width")
        require_at_least(self, 0, "shared_width", "num_dense_layers", "dense_width")
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise UsageError(
                f"Experts.experts_per_token is {self.experts_per_token} of {self.num_experts} "
                "experts; it must be from 1 to all of them"
            )
        if bool(self.num_dense_layers) != bool(self.dense_width):
            raise UsageError(
                f"Experts.num_dense_layers is {self.num_dense_layers} and dense_width "
                f"{self.dense_width}; give both, or neither"
            )

    def active_width(self, num_layers: int) -> int:
        """Returns the active feed-forward width per token, averaged over the blocks."""
        dense = self.num_dense_layers / num_layers
        active = self.width * self.experts_per_token + self.shared_width
        return round(active * (1 - dense) + self.dense_width * dense)


# The settings that `paceline.models.TransformerLM` supports; defined here so that a sweep can
# reject a shape without importing torch.
_BUILDABLE = {
    "feed_forward": "swiglu",
    "norm": "rmsnorm",
    "positions": "rotary",
    "biases": False,
    "norms_per_block": None,
    "further_parameters": 0,
    "attention_weights": None,
}


def require_buildable(shape: ModelShape) -> None:
    """Raises a `ShapeError` that names the field if a shape can be accounted for but not run."""
    for field, buildable in _BUILDABLE.items():
        value = getattr(shape, field)
        if value != buildable:
            raise ShapeError(
                f"TransformerLM cannot build {field}={value!r}, only {buildable!r}; "
                "this shape can be accounted for but not run"
            )
    if not shape.num_heads or not shape.vocab_size:
        raise ShapeError("TransformerLM needs attention heads and a vocabulary")


def nearest_buildable(shape: ModelShape) -> ModelShape:
    """Returns the shape with the same matrices, as far as `TransformerLM` can build them.

    Two plain feed-forward matrices become three with as many weights. Biases and further norms,
    which take little memory and time, are left out.
    """
    width = shape.d_ff if shape.feed_forward == "swiglu" else max(1, round(shape.d_ff * 2 / 3))
    buildable: dict[str, Any] = _BUILDABLE
    return dataclasses.replace(shape, **{**buildable, "d_ff": width})


def require_context(name: str, shape: ModelShape, context_length: int) -> None:
    """Raises a `ShapeError` if sequences are longer than a model accepts."""
    if context_length > shape.max_context_length:
        raise ShapeError(
            f"--context {context_length} is longer than the {shape.max_context_length} tokens "
            f"that model {name!r} accepts"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchShape:
    """The batch that one data-parallel rank processes per optimizer step."""

    num_sequences: int
    """Sequences in one forward pass of one rank (the micro-batch)."""
    context_length: int
    """Tokens in a sequence."""
    accumulation_steps: int = 1
    """Forward and backward passes per optimizer step."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "num_sequences", "context_length", "accumulation_steps")

    @property
    def tokens_per_pass(self) -> int:
        """Tokens that one rank processes in one forward pass."""
        return self.num_sequences * self.context_length

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one rank processes per optimizer step."""
        return self.tokens_per_pass * self.accumulation_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes in which a training step stores and computes."""

    parameters: DType = "float32"
    """The weights that the forward pass reads."""
    compute: DType = "float32"
    """The operands of matmuls."""
    gradients: DType = "float32"
    """The accumulated gradients."""
    reduction: DType = "float32"
    """The gradients while they are reduced across ranks."""
    optimizer_state: DType = "float32"
    """The optimizer's moments."""
    master_weights: bool = False
    """Whether the optimizer keeps a float32 copy of lower-precision parameters."""
    autocast: bool = False
    """Whether weights are cast to the compute dtype at each operation."""

    def __post_init__(self) -> None:
        for field in ("parameters", "compute", "gradients", "reduction", "optimizer_state"):
            require_choice("Precision", field, getattr(self, field), DType)


# Names follow common usage: bfloat16 and float16 mean autocast over float32 weights.
_PRECISIONS: dict[str, Precision] = {
    "float32": Precision(),
    "bfloat16": Precision(compute="bfloat16", autocast=True),
    "float16": Precision(compute="float16", autocast=True),
}


def precision_preset(name: str) -> Precision:
    """Returns the precision called `name`: float32, bfloat16 autocast or float16 autocast."""
    if name not in _PRECISIONS:
        raise UsageError(f"unknown precision {name!r}; known: {', '.join(_PRECISIONS)}")
    return _PRECISIONS[name]
