"""The layout of a model over devices, and the predictions for it.

A `Plan` names its predictions like the metrics of a measured record, so that predictions can
be compared with measurements without a translation table.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, get_args

from paceline.core.errors import ShapeError
from paceline.core.specs import (
    BatchShape,
    Experts,
    ModelShape,
    Precision,
    require_at_least,
    require_choice,
)

Sharding = Literal["none", "optimizer", "gradients", "parameters"]
"""ZeRO stages 0 to 3, in this order."""
ActivationCheckpointing = Literal["none", "selective", "full"]

SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
CHECKPOINTINGS: tuple[ActivationCheckpointing, ...] = get_args(ActivationCheckpointing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """The sizes of the mesh axes, and the state that is sharded along them.

    The world size is replicate × shard × context × tensor × pipeline, of which replicate × shard
    is the data-parallel size. Expert parallelism reuses the tensor, context and data-parallel
    ranks of one stage.
    """

    replicate: int = 1
    """Replicas of the sharded model; they average their gradients."""
    shard: int = 1
    """Ranks over which one replica's state is split, as `sharding` selects."""
    tensor: int = 1
    """Ranks over which each matrix is split."""
    pipeline: int = 1
    """Stages over which the blocks are split."""
    context: int = 1
    """Ranks over which each sequence is split."""
    expert: int = 1
    """Ranks over which the experts of a mixture are distributed; an expert is never split."""
    sharding: Sharding = "none"
    """The state that is split over `shard`: each choice includes those before it (ZeRO 0 to 3)."""
    sequence_parallel: bool = False
    """Whether norms and residuals are split over the tensor axis as well."""
    pipeline_interleave: int = 1
    """Virtual stages that each pipeline rank holds."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """Which activations are recomputed instead of kept."""
    bucket_size_mb: float | None = None
    """Gradient bucket cap in MiB, as in torch; None for the strategy's default."""

    def __post_init__(self) -> None:
        axes = ("replicate", "shard", "tensor", "pipeline", "context", "expert")
        require_at_least(self, 1, *axes, "pipeline_interleave")
        require_choice("ParallelLayout", "sharding", self.sharding, Sharding)
        checkpointing = self.activation_checkpointing
        require_choice(
            "ParallelLayout", "activation_checkpointing", checkpointing, ActivationCheckpointing
        )
        if self.shard > 1 and self.sharding == "none":
            raise ShapeError(
                f"ParallelLayout.shard is {self.shard} but sharding is 'none'; set sharding to "
                "what is sharded, or use replicate"
            )
        if self.tensor * self.context * self.data_parallel % self.expert:
            raise ShapeError(
                f"ParallelLayout.expert is {self.expert}; it must divide the tensor, context and "
                "data-parallel ranks of a stage"
            )
        if self.bucket_size_mb is not None and not self.bucket_size_mb > 0:
            raise ShapeError("ParallelLayout.bucket_size_mb must be positive, or None")

    @property
    def data_parallel(self) -> int:
        """Number of ranks that process different data."""
        return self.replicate * self.shard

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.data_parallel * self.context * self.tensor * self.pipeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A predicted number, with its prediction interval if known."""

    value: float
    """The point estimate."""
    low: float | None = None
    """Lower end of the interval."""
    high: float | None = None
    """Upper end of the interval."""

    def __post_init__(self) -> None:
        for field in ("value", "low", "high"):
            number = getattr(self, field)
            if number is not None and not math.isfinite(number):
                raise ShapeError(f"Estimate.{field} is {number}; it must be finite")
        if self.low is not None and self.low > self.value:
            raise ShapeError(f"Estimate.low {self.low} is above its value {self.value}")
        if self.high is not None and self.high < self.value:
            raise ShapeError(f"Estimate.high {self.high} is below its value {self.value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A model, the batch of each rank, the layout, the hardware and the predictions."""

    model: ModelShape
    """The model to train."""
    batch: BatchShape
    """The batch that each data-parallel rank processes per step."""
    precision: Precision
    """dtypes of storage and arithmetic."""
    layout: ParallelLayout
    """Mesh and sharding."""
    hardware: str
    """Identifier of the device in the hardware table, or of a calibration."""
    predictions: Mapping[str, Estimate] = dataclasses.field(default_factory=dict)
    """Estimates, named like the metrics of the record that would measure them."""
    experts: Experts | None = None
    """The experts of a mixture, which replace feed-forward layers; `model` has the active width."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, summed over all ranks."""
        return self.batch.tokens_per_step * self.layout.data_parallel
