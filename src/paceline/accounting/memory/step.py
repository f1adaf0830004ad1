"""What a device holds at the three instants of a training step, states and all else.

Beside the states (`paceline.accounting.memory.model_states`):

    buffers       the tables of rotary positions, and tokens and targets of the batch. Until the
                  first backward there are no gradients, but a container's buckets for them are
                  there from the start
    activations   see `paceline.accounting.memory.activations`; fused AdamW needs nothing more.
                  Without buckets, gradients appear as activations go, and the peak is the larger
                  of the two at either end of backward

What is under way counts as activations too, if communication keeps up with backward. Where
gradients go to owners, a message of a bucket's size is there from its first gradient to its last,
and then the others' parts of this rank's share arrive. Where parameters are divided, messages are
of layers, and the layers that are gathered come on top. Slow communication adds to that, up to
all gradients twice.
"""

import dataclasses

from paceline.accounting.memory.activations import (
    Checkpointing,
    GradientMessage,
    activation_peaks,
)
from paceline.accounting.memory.model_states import model_state_bytes, state_units
from paceline.accounting.memory.shards import cut_unit
from paceline.accounting.parameters import block_parameters
from paceline.core.specs import (
    AttentionImplementation,
    BatchShape,
    ModelShape,
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
        precision: Formats of parameters, activations and the optimizer's state.
        strategy: How ranks are kept equal, and what of the states each holds.
        world_size: How many ranks there are.
        activation_checkpointing: Whether blocks are computed once more in backward.
        attention: Fused (sdpa, tiled), or storing its scores (naive).
        bucket_size_mb: In MiB; matters where buckets are sent to owners and let go.
    """
    states = model_state_bytes(
        shape, precision, strategy, world_size, bucket_size_mb=bucket_size_mb
    )
    tables = shape.max_context_length * shape.head_width * _TABLE_BYTES
    tokens = 2 * batch.tokens_per_pass * _TOKEN_BYTES
    before = MemoryParts(
        parameters=states.parameters,
        gradients=states.gradients,
        optimizer_state=states.optimizer_state,
        buffers=tables + tokens,
        activations=_activations(
            shape,
            batch,
            precision,
            strategy,
            world_size,
            activation_checkpointing,
            attention,
            bucket_size_mb,
        ),
    )
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


def _activations(
    shape: ModelShape,
    batch: BatchShape,
    precision: Precision,
    strategy: StrategyName,
    world_size: int,
    activation_checkpointing: Checkpointing,
    attention: AttentionImplementation,
    bucket_size_mb: float,
) -> int:
    """Returns what the peak before the optimizer's step holds beyond states and buffers."""
    keeps_gradients = world_size == 1 or strategy == "none"
    messages: tuple[GradientMessage, ...] = ()
    if strategy in SHARDED_GRADIENTS:
        keeps_gradients = False
        messages = _messages(shape, precision, strategy, world_size, bucket_size_mb)
    peaks = activation_peaks(
        shape,
        batch,
        activation_checkpointing,
        precision=precision,
        attention=attention,
        keeps_gradients=keeps_gradients,
        messages=messages,
    )
    gathered = (0, 0)
    if strategy in SHARDED_PARAMETERS:
        gathered = _gathered_bytes(shape, precision, strategy, activation_checkpointing)
    peak = max(map(sum, zip(peaks, gathered, strict=True)))
    if keeps_gradients or strategy in SHARDED_PARAMETERS:
        # Gradients come as activations go: at the peak they are in it, or not there yet.
        peak -= model_state_bytes(
            shape, precision, strategy, world_size, bucket_size_mb=bucket_size_mb
        ).gradients
    return max(peak, 0)


def _messages(
    shape: ModelShape,
    precision: Precision,
    strategy: StrategyName,
    world_size: int,
    bucket_size_mb: float,
) -> tuple[GradientMessage, ...]:
    """Returns the messages of a backward pass in their order."""
    element_bytes = bytes_per_element(precision.gradients)
    messages = []
    units = state_units(shape, strategy, element_bytes, bucket_size_mb)
    for unit in units[::-1] if strategy in SHARDED_PARAMETERS else units:
        share = cut_unit(unit, world_size, element_bytes).share * element_bytes
        messages.append(
            GradientMessage(
                num_tensors=len(unit),
                num_bytes=world_size * share,
                arriving_bytes=(world_size - 1) * share,
            )
        )
    return tuple(messages)


def _gathered_bytes(
    shape: ModelShape,
    precision: Precision,
    strategy: StrategyName,
    activation_checkpointing: Checkpointing,
) -> tuple[int, int]:
    """Returns what layers take that are there in whole before backward's blocks, and in them."""
    block = sum(rows * columns for rows, columns in block_parameters(shape).values())
    matrix = shape.vocab_size * shape.d_model
    num_blocks = min(shape.num_layers, 1 + _LAYERS_AHEAD[strategy])
    if strategy == "torch_fsdp2":
        # What is no block is one layer, which stays gathered.
        outside = matrix * (1 if shape.tied_embeddings else 2) + shape.d_model
        first, later = outside, outside + num_blocks * block
    else:
        if activation_checkpointing == "full":
            # Blocks that have run again are freed only when backward is over.
            num_blocks = shape.num_layers
        first, later = matrix, matrix + num_blocks * block
    element_bytes = bytes_per_element(precision.parameters)
    return element_bytes * first, element_bytes * later
