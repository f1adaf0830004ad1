"""Arrays of layouts, one array per mesh axis, and the workload of a step.

Ranks are numbered with the tensor axis innermost, then context, shard, replicate, and pipeline
outermost, so that the axes with the most communication are closest together. The stride of an axis
is the product of the axes inside it.

A shape may have arrays as dimensions, one entry per layout (`join_shapes`), so that one call
predicts runs of many models. Properties that change the formulas (norm, activation, biases) must be
the same in all.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from paceline.accounting.collectives import Numbers
from paceline.core.errors import UsageError
from paceline.core.plan import CHECKPOINTINGS, SHARDINGS, ParallelLayout
from paceline.core.specs import Experts, ModelShape, Precision, bytes_per_element
from paceline.predict.cost.framework_memory import PLAIN, FrameworkMemory

Integers = npt.NDArray[np.int64]
Axis = Literal["tensor", "context", "shard", "replicate", "pipeline"]
AttentionKernel = Literal["naive", "flash"]

AXES: tuple[Axis, ...] = ("tensor", "context", "shard", "replicate", "pipeline")
"""Mesh axes, innermost first."""
SHARDING_STAGES: dict[str, int] = {name: stage for stage, name in enumerate(SHARDINGS)}
CHECKPOINTING: dict[str, int] = {name: number for number, name in enumerate(CHECKPOINTINGS)}

_ADAM_MOMENTS = 2
_MASTER_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layouts:
    """Many layouts, one array per field. Any field may also be a scalar shared by all layouts."""

    replicate: Integers
    shard: Integers
    tensor: Integers
    pipeline: Integers
    pipeline_interleave: Integers
    context: Integers
    stage: Integers
    """ZeRO stage: 0 shards nothing, 3 shards everything."""
    sequence_parallel: npt.NDArray[np.bool_]
    checkpointing: Integers
    """0 none, 1 selective, 2 full."""
    expert: Any = 1
    """Number of expert ranks, which are also data, context and tensor ranks."""
    shards_context: Any = False
    """Whether states are also sharded over context ranks, as in Megatron and torch's FSDP."""

    @classmethod
    def of(cls, layouts: Sequence[ParallelLayout]) -> "Layouts":
        """Returns arrays from individual layouts."""

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
        """Returns the rank distance between neighbours along an axis."""
        stride: Any = 1
        for inner in AXES[: AXES.index(axis)]:
            stride = stride * getattr(self, inner)
        return stride

    @property
    def model_devices(self) -> Any:
        """Number of devices that divide one copy of the model, before any sharding."""
        return self.tensor * self.pipeline

    @property
    def state_shards(self) -> Any:
        """Number of ranks over which a ZeRO stage shards states."""
        return self.shard * np.where(self.shards_context, self.context, 1)

    @property
    def stream_split(self) -> Any:
        """Number of tensor ranks that divide norms and residuals."""
        return np.where(self.sequence_parallel, self.tensor, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How a framework runs the same step."""

    attention: AttentionKernel = "flash"
    """naive computes all scores and stores them; flash skips masked scores and stores none."""
    dropout: bool = False
    """Whether dropout applies to attention probabilities and both residual branches."""
    repeated_matmuls: float = 0.0
    """Fraction of matmuls that selective recomputation repeats; 0.5 in torchtitan."""
    fused_loss: bool = False
    """Whether one kernel reads logits and writes their gradient, without a float32 copy."""
    reduces_every_pass: bool = False
    """Whether gradients are averaged after each micro-batch instead of once per step."""
    framework_memory: FrameworkMemory = PLAIN
    """The framework's memory behaviour beyond the formulas."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload(StepSettings):
    """Work of one data-parallel rank in a step."""

    shape: ModelShape
    precision: Precision
    context_length: int
    micro_batch: Numbers
    """Sequences in one forward pass; an array if it differs between layouts."""
    num_micro_batches: Numbers
    """Forward passes per step; an array if it differs between layouts."""
    experts: Experts | None = None
    """Experts of a mixture; the shape's `d_ff` is then the active width."""
    trainer_stages: bool = False
    """Whether stages have the blocks that Paceline's trainer assigns, instead of equal numbers."""

    def __post_init__(self) -> None:
        for field in ("context_length", "micro_batch", "num_micro_batches"):
            if np.min(getattr(self, field)) < 1:
                raise UsageError(f"Workload.{field} must be at least 1 everywhere")

    def forwards(self, layouts: Layouts) -> Any:
        """Returns the forward matmul passes of a block: 1, or up to 2 with recomputation."""
        selective = np.where(
            layouts.checkpointing == CHECKPOINTING["selective"], 1 + self.repeated_matmuls, 1
        )
        return np.where(layouts.checkpointing == CHECKPOINTING["full"], 2, selective)

    @property
    def tokens(self) -> Any:
        """Tokens of one data-parallel rank per pass, before context parallelism."""
        return np.asarray(self.micro_batch, dtype=np.float64) * self.context_length

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element of an activation or matmul operand."""
        return bytes_per_element(self.precision.compute)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of one stored weight."""
        return bytes_per_element(self.precision.parameters)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one accumulated gradient element."""
        return bytes_per_element(self.precision.gradients)

    @property
    def reduction_bytes(self) -> int:
        """Bytes of one gradient element while ranks average it."""
        return bytes_per_element(self.precision.reduction)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state per parameter, including a master weight if there is one."""
        master = _MASTER_BYTES if self.precision.master_weights else 0
        return _ADAM_MOMENTS * bytes_per_element(self.precision.optimizer_state) + master

    @property
    def update_bytes(self) -> int:
        """Bytes read and written to update one parameter.

        The optimizer state and the parameter are read and written, and the gradient is read. With a
        master weight, the parameter itself is only written.
        """
        parameter = self.parameter_bytes * (1 if self.precision.master_weights else 2)
        return 2 * self.optimizer_bytes + self.gradient_bytes + parameter


_KINDS = (
    *("feed_forward", "norm", "positions", "biases", "tied_embeddings"),
    *("norms_per_block", "further_parameters", "attention_weights"),
)
_NUMBERS = ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "max_context_length")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeArrays(ModelShape):
    """A shape whose dimensions are arrays. All models in it have attention."""

    def __post_init__(self) -> None:
        """Skips the checks of `ModelShape`: each joined shape has passed them."""

    @property
    def has_attention(self) -> bool:
        """Always true: `join_shapes` requires attention."""
        return True


def formula_of(shape: ModelShape) -> tuple[Any, ...]:
    """Returns the properties that must be equal for shapes to be joined."""
    return tuple(getattr(shape, name) for name in _KINDS)


def join_shapes(shapes: Sequence[ModelShape]) -> ModelShape:
    """Joins shapes with the same `formula_of` into one shape with an array entry for each."""
    if len({formula_of(shape) for shape in shapes}) != 1 or not all(
        shape.has_attention for shape in shapes
    ):
        raise UsageError("only shapes with the same kind of blocks, attention included, are joined")
    first = shapes[0]
    numbers: dict[str, Any] = {
        name: np.array([getattr(shape, name) for shape in shapes], dtype=np.float64)
        for name in _NUMBERS
    }
    numbers["num_kv_heads"] = np.array([shape.key_value_heads for shape in shapes], dtype=float)
    numbers["head_dim"] = np.array([shape.head_width for shape in shapes], dtype=float)
    return ShapeArrays(**numbers, **{name: getattr(first, name) for name in _KINDS})
