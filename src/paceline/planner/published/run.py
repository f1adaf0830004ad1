"""Schema of one published training run: model, device, layout and measured speed.

Fields that a source does not state are None; no values are inferred here. If a source contradicts
itself, the row keeps the published values and `marks` lists the contradictions
(`paceline.planner.published.checks`).
"""

import math
from typing import Literal

import msgspec

from paceline.core.errors import DataError
from paceline.core.specs import ModelShape
from paceline.planner.cost.experts import Experts

Unit = Literal[
    "s/iteration",
    "tokens/s/device",
    "model TFLOP/s/device",
    "hardware TFLOP/s/device (recomputation counted)",
    "TFLOP/s/chip",
    "MFU %",
    "OOM",
]
"""OOM: the run ran out of memory and has no measured value."""
Evidence = Literal["text", "image", "secondary", "already in the project"]
"""text: stated in the source; image: read off a figure; secondary: transcribed by a third party."""

_FEED_FORWARD = {"squared_relu": "gelu"}
"""Activation functions with the same matrices and memory traffic as another."""
_POSITIONS = {"alibi": "none"}


class PublishedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dimensions of a published model, with their source."""

    d_model: int
    num_layers: int
    num_heads: int
    d_ff: int
    vocab_size: int
    feed_forward: Literal["gelu", "swiglu", "squared_relu"]
    norm: Literal["layernorm", "rmsnorm"]
    positions: Literal["learned", "rotary", "alibi"]
    biases: bool
    tied_embeddings: bool
    source: str
    num_kv_heads: int | None = None
    head_dim: int | None = None
    experts: Experts | None = None
    """The experts that replace feed-forward layers; None for a dense model."""

    def shape(self, context_length: int) -> ModelShape:
        """Returns the model's shape. With experts, `d_ff` is the active width."""
        return ModelShape(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            d_ff=self.d_ff
            if self.experts is None
            else self.experts.active_width(self.d_ff, self.num_layers),
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_context_length=context_length,
            feed_forward=_FEED_FORWARD.get(self.feed_forward, self.feed_forward),  # type: ignore[arg-type]
            norm=self.norm,
            positions=_POSITIONS.get(self.positions, self.positions),  # type: ignore[arg-type]
            biases=self.biases,
            tied_embeddings=self.tied_embeddings,
        )


class PublishedRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of the data set."""

    id: str
    source: str
    """Key of the source, see `sources`; for user rows, any text."""
    framework: str
    model: str
    device: str
    precision: str
    unit: Unit
    measured: float | None = None
    place: str = ""
    """Line, table or figure in the source."""
    devices: int | None = None
    context_length: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    tensor: int = 1
    pipeline: int = 1
    interleave: int = 1
    context: int = 1
    expert: int = 1
    data: int | None = None
    """Number of data-parallel ranks: replicas times shards."""
    zero: Literal[0, 1, 2, 3] | None = None
    shard: int | None = None
    replicate: int | None = None
    sequence_parallel: bool | None = None
    recompute: str | None = None
    overlap: str | None = None
    network: str | None = None
    evidence: Evidence = "text"
    note: str | None = None
    also: dict[str, float] = {}
    """Additional figures of the same run, such as model_tflops, mfu_pct, memory_gb."""
    marks: tuple[str, ...] = ()
    """Contradictions in this row."""
    shape: PublishedModel | None = None
    """The model's dimensions, if the model is neither in `models.json` nor a preset."""

    def __post_init__(self) -> None:
        axes = ("devices", "context_length", "global_batch", "micro_batch", "data", "shard")
        for field in (*axes, "replicate", "tensor", "pipeline", "interleave", "context", "expert"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise DataError(f"run {self.id}: {field} is {value}; it must be at least 1")
        if (self.measured is None) != (self.unit == "OOM"):
            raise DataError(f"run {self.id}: give a measured value, or the unit OOM, not both")
        if self.measured is not None and not 0 < self.measured < math.inf:
            raise DataError(f"run {self.id}: measured is {self.measured}; it must be positive")

    @property
    def axes_product(self) -> int | None:
        """Product of the layout's axes; None if data parallelism is not stated."""
        if self.data is None:
            return None
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens in the global batch; None if it is not stated."""
        if self.global_batch is None or self.context_length is None:
            return None
        return self.global_batch * self.context_length

    @property
    def step_s(self) -> float | None:
        """Seconds per step, stated or derived from tokens per second and device; else None."""
        if self.unit == "s/iteration":
            return self.measured
        if self.unit != "tokens/s/device" or self.measured is None:
            return None
        if self.tokens_per_step is None or self.devices is None:
            return None
        return self.tokens_per_step / (self.measured * self.devices)
