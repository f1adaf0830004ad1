"""What a device holds of a model while it trains, and at the three instants of a step.

With AdamW in the formats of a `Precision`, P parameters in T tensors, on n ranks:

    parameters        4P in float32; P/n of them where a strategy divides parameters (ZeRO 3)
    gradients         4P; P/n from ZeRO 2 on. Our containers' buckets hold 4 bytes per tensor more,
                      which tell whether a rank has a gradient for it
    optimizer state   two moments, 8P, and 4 bytes per tensor for its count of steps; the moments
                      of P/n parameters from ZeRO 1 on (Rajbhandari et al. 2020)

A share is rounded up, since a rank cannot own less than an element. torch's
ZeroRedundancyOptimizer deals out whole parameters instead, the largest first to the rank that has
least, so that one rank holds more than P/n. Filling that aligns tensors in buckets is left out:
widths that are multiples of four need none.

Over a step, beside the states:

    buffers       the tables of rotary positions, and tokens and targets of the batch. Until the
                  first backward there are no gradients, but a container's buckets for them are
                  there from the start
    activations   see `paceline.accounting.activations`; AdamW's fused step needs nothing more.
                  Without buckets, gradients appear as activations go, and the peak is the larger
                  of the two at either end of backward

What is under way counts as activations too, as far as there is any at the peak, early in backward,
and communication keeps up with it. Where gradients go to owners, it is what the head and the last
block have made so far, once as it is sent and once as it arrives. Where parameters are
divided as well, it is the layers that are gathered, and a block later the gradients of the
block before, sent and arriving; there are no gradients of shares yet. Slow communication
adds to that, up to all gradients twice.
"""

import dataclasses
from typing import Any

from paceline.accounting.activations import (
    Checkpointing,
    block_bytes,
    peak_activation_bytes,
)
from paceline.accounting.dealing import deal_out
from paceline.accounting.parameters import count_parameters
from paceline.core.specs import BatchShape, ModelShape, Precision, bytes_per_element
from paceline.core.strategies import (
    SHARDED_GRADIENTS,
    SHARDED_PARAMETERS,
    SHARDED_STATE,
    StrategyName,
)

_COUNTER_BYTES = 4
_TABLE_BYTES = 4
_TENSORS_PER_BLOCK = 9
_TOKEN_BYTES = 8
_OWN_BUCKETS: tuple[StrategyName, ...] = (
    "naive",
    "flat",
    "overlapped",
    "bucketed",
    "sharded_optimizer",
)
# How many layers are gathered before they are needed.
_LAYERS_AHEAD: dict[StrategyName, int] = {"fully_sharded": 2, "torch_fsdp2": 1}

INSTANTS = ("after_init", "before_step", "after_step")
"""When model, container and optimizer are made; the peaks before and in the optimizer's step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """Bytes of one device at one instant, by what they hold."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelStates:
    """Bytes of one device that outlive a step; arrays where world sizes are."""

    parameters: Any
    gradients: Any
    optimizer_state: Any


def parameter_sizes(shape: ModelShape) -> list[int]:
    """Returns the elements of every parameter of `TransformerLM`, in its order."""
    width = shape.d_model
    block = [
        width,
        *(width * shape.attention_width, *[width * shape.key_value_width] * 2),
        shape.attention_width * width,
        width,
        *[width * shape.d_ff] * 3,
    ]
    embedding = shape.vocab_size * width
    head = [] if shape.tied_embeddings else [embedding]
    return [embedding, *block * shape.num_layers, width, *head]


def model_state_bytes(
    shape: ModelShape, precision: Precision, strategy: StrategyName, world_size: Any
) -> ModelStates:
    """Returns what one device keeps of the model; on the rank that keeps most.

    `world_size` may be an array of integers, unless the strategy deals out whole parameters.
    """
    num_parameters = count_parameters(shape).total
    share = -(-num_parameters // world_size)
    num_updated = share if strategy in SHARDED_STATE else num_parameters
    sizes = parameter_sizes(shape)
    num_counters: Any = len(sizes)
    if strategy in ("torch_zero", "torch_zero_view"):
        num_updated, num_counters = _largest_deal(sizes, world_size)
    presence = len(sizes) if strategy in _OWN_BUCKETS else 0
    moments = 2 * bytes_per_element(precision.optimizer_state)
    return ModelStates(
        parameters=bytes_per_element(precision.parameters)
        * (share if strategy in SHARDED_PARAMETERS else num_parameters),
        gradients=bytes_per_element(precision.gradients)
        * (presence + (share if strategy in SHARDED_GRADIENTS else num_parameters)),
        optimizer_state=moments * num_updated + _COUNTER_BYTES * num_counters,
    )


def step_memory(
    shape: ModelShape,
    batch: BatchShape,
    precision: Precision,
    strategy: StrategyName,
    world_size: int,
    *,
    activation_checkpointing: Checkpointing = "none",
) -> dict[str, MemoryParts]:
    """Predicts the memory of a step at its three instants, on the rank that holds most."""
    states = model_state_bytes(shape, precision, strategy, world_size)
    tables = shape.max_context_length * shape.head_width * _TABLE_BYTES
    tokens = 2 * batch.tokens_per_pass * _TOKEN_BYTES
    before = MemoryParts(
        parameters=states.parameters,
        gradients=states.gradients,
        optimizer_state=states.optimizer_state,
        buffers=tables + tokens,
        activations=_activations(
            shape, batch, precision, strategy, world_size, activation_checkpointing
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
) -> int:
    """Returns what the peak before the optimizer's step holds beyond states and buffers."""
    appear = world_size == 1 or strategy in ("none", *SHARDED_GRADIENTS)
    peak = peak_activation_bytes(shape, batch, activation_checkpointing, keeps_gradients=appear)
    if not appear:
        return peak
    head, down = shape.vocab_size * shape.d_model, shape.d_model * shape.d_ff
    element = bytes_per_element(precision.gradients)
    if strategy in SHARDED_PARAMETERS:
        block = element * sum(parameter_sizes(shape)[1 : 1 + _TENSORS_PER_BLOCK])
        num_gathered = min(shape.num_layers, 1 + _LAYERS_AHEAD[strategy])
        peak += num_gathered * block + element * head
        if shape.num_layers > 1:
            saved = block_bytes(shape, batch, activation_checkpointing)
            peak = max(peak, peak - saved + 2 * block)
    elif strategy in SHARDED_GRADIENTS:
        return peak + element * (head + shape.d_model + down)
    stream = element * batch.tokens_per_pass * shape.d_model
    gradients: int = model_state_bytes(shape, precision, strategy, world_size).gradients
    return max(peak - gradients, stream)


def _largest_deal(sizes: list[int], world_size: int) -> tuple[int, int]:
    """Returns elements and number of the parameters of the rank that is dealt the most."""
    loads = [0] * world_size
    owners = deal_out(sizes, loads)
    most, rank = max((load, rank) for rank, load in enumerate(loads))
    return most, owners.count(rank)
