"""What a device holds at the three instants of a training step, states and all else.

Beside the states (`paceline.accounting.memory.model_states`):

    buffers       the tables of rotary positions, and tokens and targets of the batch. Until the
                  first backward there are no gradients, but a container's buckets for them are
                  there from the start
    activations   see `paceline.accounting.memory.activations`; fused AdamW needs nothing more.
                  Without buckets, gradients appear as activations go, and the peak is the larger
                  of the two at either end of backward

Gradients wait where they were made until some of their bucket can be copied into it together.

What is in flight counts as activations too, if communication keeps up with backward. Where
gradients are reduce-scattered, a buffer of a bucket's size is there from its first gradient to its
last, and then the other ranks' parts of this rank's shard arrive. Where parameters are sharded,
buckets are layers, and the layers that are all-gathered come on top. Slow communication adds to
that, up to all gradients twice.
"""

import dataclasses

from paceline.accounting.communication.buckets import GROUP_BYTES
from paceline.accounting.memory.activations import BucketSize, Checkpointing, count_activations
from paceline.accounting.memory.model_states import (
    gradient_buckets,
    layer_shapes,
    layer_shard,
    model_state_bytes,
    state_units,
)
from paceline.accounting.memory.shards import cut_unit
from paceline.accounting.parameters import block_parameters, count_parameters
from paceline.core.specs import (
    AttentionImplementation,
    BatchShape,
    ModelShape,
    Phase,
    Precision,
    bytes_per_element,
)
from paceline.core.strategies import (
    DEFAULT_BUCKET_SIZE_MB,
    SHARDED_GRADIENTS,
    SHARDED_PARAMETERS,
    StrategyName,
)

_TABLE_BYTES = 4
_TOKEN_BYTES = 8
_ADAM_MOMENTS = 2
_FLOAT32_BYTES = 4
# Those whose buckets hold several gradients and outlive the step.
_ALL_REDUCED: tuple[StrategyName, ...] = ("flat", "bucketed", "sharded_optimizer")
# How many layers are gathered before they are needed.
_LAYERS_AHEAD: dict[StrategyName, int] = {"fully_sharded": 2, "torch_fsdp2": 1}

INSTANTS = ("after_init", "before_step", "after_step")
"""When model, container and optimizer are made; the peaks before and in the optimizer's step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """Bytes of a device at one instant: `parameters`, `gradients`, `optimizer_state` and others."""

    parameters: int
    gradients: int
    optimizer_state: int
    buffers: int
    """What else outlives a step: the model's tables, the batch, what a container keeps."""
    activations: int
    """What the peak holds beyond the others."""

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(dataclasses.astuple(self))


def step_memory(
    shape: ModelShape,
    batch: BatchShape,
    precision: Precision,
    strategy: StrategyName,
    world_size: int,
    *,
    activation_checkpointing: Checkpointing = "none",
    attention: AttentionImplementation = "sdpa",
    bucket_size_mb: float = DEFAULT_BUCKET_SIZE_MB,
) -> dict[str, MemoryParts]:
    """Predicts the memory of a step at its three instants, on the rank that holds most.

    Args:
        shape: The model.
        batch: Of one rank.
        precision: dtypes of parameters, activations and the optimizer's state.
        strategy: How ranks are kept equal, and what of the states each holds.
        world_size: How many ranks there are.
        activation_checkpointing: Whether blocks are computed once more in backward.
        attention: Fused (sdpa, tiled), or storing its scores (naive).
        bucket_size_mb: In MiB; matters where buckets are reduce-scattered and freed.
    """
    states = model_state_bytes(
        shape, precision, strategy, world_size, bucket_size_mb=bucket_size_mb
    )
    tables = shape.max_context_length * shape.head_width * _TABLE_BYTES
    tokens = 2 * batch.tokens_per_pass * _TOKEN_BYTES
    keeps_gradients = strategy not in SHARDED_GRADIENTS and (world_size == 1 or strategy == "none")
    buckets = _buckets(shape, precision, strategy, world_size, bucket_size_mb)
    options = (activation_checkpointing, precision, attention, keeps_gradients, buckets)
    peaks = count_activations(shape, batch, *options).peaks
    gathered = _gathered_bytes(shape, precision, strategy, activation_checkpointing)
    peak = max(map(sum, zip(peaks, gathered, strict=True)))
    if keeps_gradients or strategy in SHARDED_PARAMETERS:
        # Gradients come as activations go: at the peak they are in it, or not there yet.
        peak = max(peak - states.gradients, 0)
    before = MemoryParts(**dataclasses.asdict(states), buffers=tables + tokens, activations=peak)
    has_buckets = world_size > 1 and strategy not in ("none", *SHARDED_PARAMETERS)
    return {
        "after_init": dataclasses.replace(
            before,
            gradients=0,
            optimizer_state=0,
            buffers=before.buffers + (states.gradients if has_buckets else 0),
            activations=0,
        ),
        "before_step": before,
        "after_step": dataclasses.replace(before, activations=0),
    }


def _buckets(
    shape: ModelShape,
    precision: Precision,
    strategy: StrategyName,
    world_size: int,
    bucket_size_mb: float,
) -> tuple[BucketSize, ...]:
    """Returns the buckets that gradients move into, in the order of backward."""
    element_bytes = bytes_per_element(precision.gradients)
    if strategy in SHARDED_PARAMETERS:
        layers = layer_shapes(shape)[::-1]
        shards = [(len(one), layer_shard(one, world_size, element_bytes)) for one in layers]
    elif strategy in SHARDED_GRADIENTS:
        units = state_units(shape, strategy, element_bytes, bucket_size_mb)
        shards = [(len(one), cut_unit(one, world_size, element_bytes).share) for one in units]
    elif strategy in _ALL_REDUCED and world_size > 1:
        sizes_mb = {"flat": None, "sharded_optimizer": DEFAULT_BUCKET_SIZE_MB}
        units = gradient_buckets(shape, element_bytes, sizes_mb.get(strategy, bucket_size_mb))
        return tuple(BucketSize(len(one), group_bytes=GROUP_BYTES) for one in units)
    else:
        return ()
    return tuple(
        BucketSize(
            num_tensors,
            world_size * shard * element_bytes,
            (world_size - 1) * shard * element_bytes,
            0 if strategy in SHARDED_PARAMETERS else GROUP_BYTES,
        )
        for num_tensors, shard in shards
    )


def _gathered_bytes(
    shape: ModelShape,
    precision: Precision,
    strategy: StrategyName,
    activation_checkpointing: Checkpointing,
) -> tuple[int, int]:
    """Returns what all-gathered layers take before backward's blocks, and in them."""
    if strategy not in SHARDED_PARAMETERS:
        return 0, 0
    block = sum(rows * columns for rows, columns in block_parameters(shape).values())
    outside = shape.vocab_size * shape.d_model
    num_blocks = min(shape.num_layers, 1 + _LAYERS_AHEAD[strategy])
    if strategy == "torch_fsdp2":
        # What is no block is one layer, which stays gathered.
        outside = outside * (1 if shape.tied_embeddings else 2) + shape.d_model
    elif activation_checkpointing == "full":
        # Blocks that have run again are freed only when backward is over.
        num_blocks = shape.num_layers
    element_bytes = bytes_per_element(precision.parameters)
    return element_bytes * outside, element_bytes * (outside + num_blocks * block)


def minimum_step_bytes(
    shape: ModelShape, batch: BatchShape, precision: Precision, phase: Phase
) -> int:
    """Returns what weights and Adam's moments occupy, and the larger of logits and gradients.

    A lower bound, to skip what cannot run: it leaves out whatever an implementation might avoid.
    From the second step on, weights and moments are always there. Logits are gone when the last
    gradients appear, and the gradients of the last step when the logits do.

    Args:
        shape: The model's dimensions.
        batch: Sequences of a pass, and their length.
        precision: dtypes of weights, gradients, state and arithmetic.
        phase: forward, forward-backward or train: which parts of a step run.
    """
    num_parameters = count_parameters(shape).total
    resident = bytes_per_element(precision.parameters)
    if phase == "train":
        resident += _ADAM_MOMENTS * bytes_per_element(precision.optimizer_state)
        resident += _FLOAT32_BYTES if precision.master_weights else 0
    gradients = 0 if phase == "forward" else bytes_per_element(precision.gradients)
    logits = batch.tokens_per_pass * shape.vocab_size * bytes_per_element(precision.compute)
    return num_parameters * resident + max(num_parameters * gradients, logits)
