"""Many layouts at once, one array per mesh axis, and the work that they are laid over.

Ranks are numbered with the tensor axis innermost, then context, shard, replicate, and the pipeline
outermost, so that the axes that talk most lie closest together. The stride of an axis is the
product of those inside it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from paceline.accounting.communication.collectives import Numbers
from paceline.core.errors import UsageError
from paceline.core.plan import CHECKPOINTINGS, SHARDINGS, ParallelLayout
from paceline.core.specs import ModelShape, Precision, bytes_per_element
from paceline.planner.cost.experts import Experts
from paceline.planner.cost.framework_memory import PLAIN, FrameworkMemory

Integers = npt.NDArray[np.int64]
Axis = Literal["tensor", "context", "shard", "replicate", "pipeline"]
AttentionKernel = Literal["naive", "flash"]

AXES: tuple[Axis, ...] = ("tensor", "context", "shard", "replicate", "pipeline")
"""The innermost first."""
SHARDING_STAGES: dict[str, int] = {name: stage for stage, name in enumerate(SHARDINGS)}
CHECKPOINTING: dict[str, int] = {name: number for number, name in enumerate(CHECKPOINTINGS)}

_ADAM_MOMENTS = 2
_MASTER_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layouts:
    """Many layouts, one array per field; any field may also be one number for all."""

    replicate: Integers
    shard: Integers
    tensor: Integers
    pipeline: Integers
    pipeline_interleave: Integers
    context: Integers
    stage: Integers
    """ZeRO's stage: 0 shards nothing, 3 everything."""
    sequence_parallel: npt.NDArray[np.bool_]
    checkpointing: Integers
    """0 none, 1 selective, 2 full."""
    expert: Any = 1
    """Ranks over which experts are divided; they are data, context and tensor ranks as well."""
    shards_context: Any = False
    """Whether states are sharded over context ranks too, as by Megatron and torch's FSDP."""

    @classmethod
    def of(cls, layouts: Sequence[ParallelLayout]) -> "Layouts":
        """Turns layouts into arrays."""

        def numbers(field: str) -> Integers:
            return np.array([getattr(layout, field) for layout in layouts], dtype=np.int64)

        checkpointing = [CHECKPOINTING[layout.activation_checkpointing] for layout in layouts]
        return cls(
            **{field: numbers(field) for field in (*AXES, "pipeline_interleave", "expert")},
            stage=np.array([SHARDING_STAGES[layout.sharding] for layout in layouts]),
            sequence_parallel=np.array([layout.sequence_parallel for layout in layouts]),
            checkpointing=np.array(checkpointing),
        )

    def stride(self, axis: Axis) -> Any:
        """Returns how far apart two neighbours along an axis are numbered."""
        stride: Any = 1
        for inner in AXES[: AXES.index(axis)]:
            stride = stride * getattr(self, inner)
        return stride

    @property
    def model_devices(self) -> Any:
        """Devices over which the matrices of one copy are divided, before any sharding."""
        return self.tensor * self.pipeline

    @property
    def state_shards(self) -> Any:
        """Ranks over which a sharding stage divides states."""
        return self.shard * np.where(self.shards_context, self.context, 1)

    @property
    def stream_split(self) -> Any:
        """Over how many tensor ranks norms and residuals are divided."""
        return np.where(self.sequence_parallel, self.tensor, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What one data-parallel rank trains in a step."""

    shape: ModelShape
    precision: Precision
    context_length: int
    micro_batch: Numbers
    """Sequences in one forward pass; an array where layouts differ in it."""
    num_micro_batches: Numbers
    """Passes per step; an array where layouts differ in it."""
    attention: AttentionKernel = "flash"
    """naive writes its scores to memory and computes all of them; flash does neither."""
    dropout: bool = False
    """Whether attention's probabilities and both residual branches are thinned out."""
    repeated_matmuls: float = 0.0
    """Share of matmuls that selective recomputation repeats; every other one in torchtitan."""
    fused_loss: bool = False
    """Whether one kernel reads logits and writes their gradient, without a copy in float32."""
    reduces_every_pass: bool = False
    """Whether gradients are averaged after each micro-batch instead of once in a step."""
    experts: Experts | None = None
    """Experts of every block; the shape's `d_ff` is then the width that is active."""
    bucket_copies: bool = False
    """Whether buckets hold gradients a second time, instead of being where gradients lie."""
    trainer_stages: bool = False
    """Whether stages have the blocks that Paceline's trainer gives them, not equal numbers."""
    framework_memory: FrameworkMemory = PLAIN
    """What the framework holds beyond the formulas."""

    def __post_init__(self) -> None:
        for field in ("context_length", "micro_batch", "num_micro_batches"):
            if np.min(getattr(self, field)) < 1:
                raise UsageError(f"Workload.{field} must be at least 1 everywhere")

    def forwards(self, layouts: Layouts) -> Any:
        """Returns how often a block's matrices go forward in a pass: 1, 2 if all is recomputed."""
        selective = np.where(
            layouts.checkpointing == CHECKPOINTING["selective"], 1 + self.repeated_matmuls, 1
        )
        return np.where(layouts.checkpointing == CHECKPOINTING["full"], 2, selective)

    @property
    def tokens(self) -> Any:
        """Tokens of one data-parallel rank in one pass, before context parallelism."""
        return np.asarray(self.micro_batch, dtype=np.float64) * self.context_length

    @property
    def compute_bytes(self) -> int:
        """Of one number in an activation or a matrix that is multiplied."""
        return bytes_per_element(self.precision.compute)

    @property
    def parameter_bytes(self) -> int:
        """Of one weight that lives through the step."""
        return bytes_per_element(self.precision.parameters)

    @property
    def gradient_bytes(self) -> int:
        """Of one gradient that accumulates."""
        return bytes_per_element(self.precision.gradients)

    @property
    def reduction_bytes(self) -> int:
        """Of one gradient while ranks average it."""
        return bytes_per_element(self.precision.reduction)

    @property
    def optimizer_bytes(self) -> int:
        """Of the optimizer's state for one parameter, with a copy of it where one is kept."""
        master = _MASTER_BYTES if self.precision.master_weights else 0
        return _ADAM_MOMENTS * bytes_per_element(self.precision.optimizer_state) + master

    @property
    def update_bytes(self) -> int:
        """Read and written to update one parameter.

        The optimizer's own state is read and written, as is the parameter, and the gradient is
        read; where the weights have a copy, the parameter itself is only written.
        """
        parameter = self.parameter_bytes * (1 if self.precision.master_weights else 2)
        return 2 * self.optimizer_bytes + self.gradient_bytes + parameter
