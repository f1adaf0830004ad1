"""Peak memory of the passes of a step: what autograd holds, and what a strategy holds beside it.

The passes of a step's micro-batches run one after the other on one tape. The first of them finds no
gradients, the last is averaged; those between repeat each other.
"""

import functools

from paceline.accounting.buckets import aligned, cut_unit
from paceline.accounting.memory.activations import Checkpointing, record_forward
from paceline.accounting.memory.autograd_tape import Tape
from paceline.accounting.memory.model_states import (
    gradient_buckets,
    layer_shapes,
    layer_shard,
    parameter_sizes,
    state_units,
)
from paceline.accounting.memory.strategy_buffers import (
    Buckets,
    LayerPlan,
    LocalGradients,
    MessagePlan,
    ShardedLayers,
    TorchBuckets,
    TorchLayers,
)
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

_ALL_REDUCED: tuple[StrategyName, ...] = ("flat", "ddp", "zero1")
"""Strategies whose buckets hold several gradients and outlive the step."""
_MOVED_BY_TORCH: tuple[StrategyName, ...] = ("torch_ddp", "torch_zero")
_MOST_PASSES = 3
"""The first pass, one that adds to gradients, and the last."""


@functools.lru_cache(maxsize=1024)
def peak_of_passes(
    shape: ModelShape,
    batch: BatchShape,
    activation_checkpointing: Checkpointing,
    precision: Precision,
    attention: AttentionImplementation,
    strategy: StrategyName,
    world_size: int,
    bucket_size_mb: float,
    on_accelerator: bool,
) -> int:
    """Returns the peak bytes of a step's passes, without states that outlive it and its batch."""
    tape = Tape()
    held = _holder(
        tape, shape, precision, strategy, world_size, bucket_size_mb, on_accelerator=on_accelerator
    )
    return _peak(
        tape,
        held,
        shape,
        batch,
        activation_checkpointing,
        precision,
        attention,
        on_accelerator=on_accelerator,
    )


@functools.lru_cache(maxsize=1024)
def peak_of_sharded_passes(
    shape: ModelShape,
    batch: BatchShape,
    activation_checkpointing: Checkpointing,
    precision: Precision,
    num_shards: int,
    reshards: bool,
) -> int:
    """Returns the same for torch's FSDP2 on accelerators, with states over some of the ranks.

    `reshards` says whether blocks are freed between forward and backward, as with ZeRO-3.
    """
    tape = Tape()
    held = _torch_layers(tape, shape, precision, num_shards, reshards=reshards)
    return _peak(
        tape, held, shape, batch, activation_checkpointing, precision, "sdpa", on_accelerator=True
    )


def _peak(
    tape: Tape,
    held: LocalGradients,
    shape: ModelShape,
    batch: BatchShape,
    activation_checkpointing: Checkpointing,
    precision: Precision,
    attention: AttentionImplementation,
    *,
    on_accelerator: bool,
) -> int:
    passes = min(batch.accumulation_steps, _MOST_PASSES)
    tape.holder = held
    for number in range(1, passes + 1):
        forward = record_forward(
            tape, shape, batch, activation_checkpointing, precision, attention, on_accelerator
        )
        held.begin_pass(forward.parameters, averages=number == passes)
        loss = forward.loss()
        first_gradient = tape.allocate(loss.buffer.num_bytes)
        # The caller of backward holds the loss and its gradient until the end.
        tape.play_back(loss, tape.hold(first_gradient))
        held.end_pass()
        tape.release(loss.buffer, first_gradient)
    return tape.peak_bytes


def _holder(
    tape: Tape,
    shape: ModelShape,
    precision: Precision,
    strategy: StrategyName,
    world_size: int,
    bucket_size_mb: float,
    *,
    on_accelerator: bool,
) -> LocalGradients:
    sizes = parameter_sizes(shape)
    element_bytes = bytes_per_element(precision.gradients)
    if strategy in SHARDED_GRADIENTS and strategy not in SHARDED_PARAMETERS:
        buckets = []
        for unit in state_units(shape, strategy, element_bytes, bucket_size_mb):
            share = cut_unit(unit, world_size, element_bytes).share * element_bytes
            arriving = 0 if on_accelerator else (world_size - 1) * share
            buckets.append(MessagePlan(len(unit), world_size * share, arriving))
        return Buckets(tape, buckets, len(sizes))
    if world_size == 1 or strategy == "none":
        return LocalGradients(tape)
    if strategy in _MOVED_BY_TORCH:
        return TorchBuckets(tape)
    if strategy in _ALL_REDUCED:
        sizes_mb = {"flat": None, "zero1": DEFAULT_BUCKET_SIZE_MB}
        units = gradient_buckets(shape, element_bytes, sizes_mb.get(strategy, bucket_size_mb))
        return Buckets(tape, [MessagePlan(len(unit)) for unit in units], len(sizes))
    if strategy in ("naive", "overlapped"):
        return Buckets(tape, [MessagePlan(1)] * len(sizes), len(sizes))
    if strategy == "torch_fsdp2":
        return _torch_layers(tape, shape, precision, world_size)
    return _our_layers(tape, shape, precision, world_size, on_accelerator=on_accelerator)


def _our_layers(
    tape: Tape, shape: ModelShape, precision: Precision, world_size: int, *, on_accelerator: bool
) -> ShardedLayers:
    shapes = layer_shapes(shape)
    parameter_bytes = bytes_per_element(precision.parameters)
    gradient_bytes = bytes_per_element(precision.gradients)
    layers = []
    for layer in shapes:
        elements = layer_shard(layer, world_size, parameter_bytes)
        shard = (elements + aligned(len(layer), gradient_bytes)) * gradient_bytes
        layers.append(LayerPlan(world_size * elements * parameter_bytes, world_size * shard, shard))
    head = 0 if shape.tied_embeddings else shape.num_layers + 2
    return ShardedLayers(
        tape,
        layers,
        layer_of=[number for number, layer in enumerate(shapes) for _ in layer],
        layer_of_unit=[*range(shape.num_layers + 2), head],
        receives=not on_accelerator,
    )


def _torch_layers(
    tape: Tape, shape: ModelShape, precision: Precision, num_shards: int, *, reshards: bool = True
) -> TorchLayers:
    shapes, num_blocks = layer_shapes(shape), shape.num_layers
    gradient_bytes = bytes_per_element(precision.gradients)
    outside = [shapes[0][0], *(one for layer in shapes[1 + num_blocks :] for one in layer)]
    layers = []
    for layer in [outside, *shapes[1 : 1 + num_blocks]]:
        elements = sum(-(-rows // num_shards) * columns for rows, columns in layer)
        full = num_shards * elements * bytes_per_element(precision.parameters)
        shard = elements * gradient_bytes
        layers.append(LayerPlan(full, num_shards * shard, shard))
    layer_of = [
        number if number <= num_blocks else 0 for number, layer in enumerate(shapes) for _ in layer
    ]
    return TorchLayers(tape, layers, layer_of, num_blocks, reshards=reshards)


def has_lasting_gradients(strategy: StrategyName, world_size: int) -> bool:
    """Returns whether the memory of gradients outlives the step, as that of buckets does."""
    if strategy in SHARDED_GRADIENTS:
        return strategy not in SHARDED_PARAMETERS
    return world_size > 1 and strategy != "none"
