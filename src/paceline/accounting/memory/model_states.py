"""Memory of parameters, gradients and optimizer state on a device during training.

With AdamW in the dtypes of a `Precision`, P parameters take the following bytes on n ranks:

    parameters        4P in float32; 4P/n if the strategy shards parameters (ZeRO-3)
    gradients         4P; 4P/n from ZeRO-2 on. Our containers' buckets have 4 more bytes per tensor,
                      which indicate whether a rank has a gradient for it
    optimizer state   two moments, 8P, and 4 bytes per tensor for its step count; the moments of
                      P/n parameters from ZeRO-1 on (Rajbhandari et al. 2020)

That is the rule. The functions here return the sizes of the actual tensors, to the byte:

    buckets           every tensor begins at a multiple of 16 bytes
    shards            parts of a flat unit of tensors: all tensors if only the optimizer shards
                      them, those of a bucket if gradients are sharded. A unit is padded to n equal
                      shards. Whole units and sharded gradients include the padding; moments do not
    torch_zero        whole parameters, the largest first, each to the least loaded rank
    torch_fsdp2       rows of every parameter, the same number on each rank except the last ones;
                      parameters and gradients are padded to that number, moments are not
    fsdp              the same, but each parameter's rows begin at a multiple of 16 bytes, and a
                      layer's gradients include one number per tensor, as buckets do

Ranks differ in the contents of their shards; `model_state_bytes` reports the fullest rank.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.accounting.buckets import aligned, assign_largest_first, cut_unit, divide_into_buckets
from paceline.accounting.counts import block_parameters
from paceline.core.specs import ModelShape, Precision, bytes_per_element
from paceline.core.strategies import (
    DEFAULT_BUCKET_SIZE_MB,
    SHARDED_GRADIENTS,
    SHARDED_PARAMETERS,
    SHARDED_STATE,
    Compression,
    StrategyName,
)
from paceline.core.units import MIB

_COUNTER_BYTES = 4
_FLOAT32_BYTES = 4
_OWN_BUCKETS = ("naive", "flat", "overlapped", "ddp", "zero1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelStates:
    """Bytes of `parameters`, `gradients` and `optimizer_state`, which outlive a step.

    Each field is an int, or an array by rank.
    """

    parameters: Any
    gradients: Any
    optimizer_state: Any


def parameter_shapes(shape: ModelShape) -> list[tuple[int, int]]:
    """Returns rows and columns of every parameter of `TransformerLM`, in model order."""
    block = [*block_parameters(shape).values()]
    embedding = (shape.vocab_size, shape.d_model)
    head = [] if shape.tied_embeddings else [embedding]
    return [embedding, *block * shape.num_layers, (shape.d_model, 1), *head]


def parameter_sizes(shape: ModelShape) -> list[int]:
    """Returns the elements of every parameter of a `TransformerLM` of this `shape`, in order."""
    return [num_rows * num_columns for num_rows, num_columns in parameter_shapes(shape)]


def model_state_bytes(
    shape: ModelShape,
    precision: Precision,
    strategy: StrategyName,
    world_size: int,
    *,
    bucket_size_mb: float = DEFAULT_BUCKET_SIZE_MB,
) -> ModelStates:
    """Returns the model states of the fullest rank, in bytes.

    The model has this `shape` and `precision`, and trains under a `strategy` on `world_size` ranks.
    `bucket_size_mb`, in MiB, matters only if gradients are sharded: each bucket is then a unit that
    is padded and sharded.
    """
    of_ranks = rank_state_bytes(
        shape, precision, strategy, world_size, bucket_size_mb=bucket_size_mb
    )
    fullest = np.argmax(of_ranks.parameters + of_ranks.gradients + of_ranks.optimizer_state)
    by_rank = dataclasses.asdict(of_ranks)
    return ModelStates(**{name: int(sizes[fullest]) for name, sizes in by_rank.items()})


@functools.lru_cache(maxsize=64)
def rank_state_bytes(
    shape: ModelShape,
    precision: Precision,
    strategy: StrategyName,
    world_size: int,
    *,
    bucket_size_mb: float = DEFAULT_BUCKET_SIZE_MB,
) -> ModelStates:
    """Returns the model states of every rank in bytes, as arrays by rank."""
    elements = _elements_held(shape, precision, strategy, world_size, bucket_size_mb)
    moments = elements.num_moments * 2 * bytes_per_element(precision.optimizer_state)
    return ModelStates(
        parameters=elements.num_parameters * bytes_per_element(precision.parameters),
        gradients=elements.num_gradients * bytes_per_element(precision.gradients),
        optimizer_state=moments + _COUNTER_BYTES * elements.num_counters,
    )


def compression_bytes(shape: ModelShape, compression: Compression, world_size: int) -> int:
    """Returns the bytes that a rank keeps from step to step for packed gradients.

    What messages leave out of the rank's gradients has the size of the parameters in float32. A
    rank's share of the parameters has the size of what is left out of sums, or, with ZeRO-2, of the
    master of the rank's shard.
    """
    if compression not in ("int8", "int4") or world_size == 1:
        return 0
    num_parameters = sum(parameter_sizes(shape))
    return _FLOAT32_BYTES * (num_parameters + -(-num_parameters // world_size))


class _Elements(NamedTuple):
    """Numbers of elements that each rank holds, as arrays by rank."""

    num_parameters: Any
    num_gradients: Any
    num_moments: Any
    num_counters: Any


def _elements_held(
    shape: ModelShape,
    precision: Precision,
    strategy: StrategyName,
    world_size: int,
    bucket_size_mb: float,
) -> _Elements:
    sizes = parameter_sizes(shape)
    everywhere = np.ones(world_size, dtype=np.int64)
    whole = sum(sizes) * everywhere
    gradients, counters = whole, len(sizes) * everywhere
    if strategy in _OWN_BUCKETS and world_size > 1:
        element_bytes = bytes_per_element(precision.gradients)
        filled = sum(aligned(size, element_bytes) for size in sizes)
        gradients = (filled + len(sizes)) * everywhere
    if strategy in SHARDED_PARAMETERS:
        is_ours = strategy == "fsdp"
        return _rows(shape, world_size, bytes_per_element(precision.parameters), is_ours)
    if strategy == "torch_zero":
        loads = [0] * world_size
        owners = assign_largest_first(sizes, loads)
        counters = np.bincount(owners, minlength=world_size)
        return _Elements(whole, whole, num_moments=np.array(loads), num_counters=counters)
    if strategy not in SHARDED_STATE:
        return _Elements(whole, gradients, num_moments=whole, num_counters=counters)
    element_bytes = bytes_per_element(precision.parameters)
    units = [
        cut_unit(unit, world_size, element_bytes)
        for unit in state_units(shape, strategy, element_bytes, bucket_size_mb)
    ]
    owned = sum(unit.num_owned for unit in units)
    shares = sum(unit.share for unit in units) * everywhere
    if strategy in SHARDED_GRADIENTS:
        # A rank's part of a bucket is one tensor to its optimizer.
        return _Elements(
            world_size * shares,
            shares,
            num_moments=sum(unit.span for unit in units),
            num_counters=sum(unit.num_pieces > 0 for unit in units),
        )
    pieces = sum(unit.num_pieces for unit in units)
    return _Elements(world_size * shares, gradients, num_moments=owned, num_counters=pieces)


def state_units(
    shape: ModelShape, strategy: StrategyName, element_bytes: int, bucket_size_mb: float
) -> list[Sequence[int]]:
    """Returns the tensor sizes of every unit, in storage order."""
    whole = strategy == "zero1"
    return gradient_buckets(shape, element_bytes, None if whole else bucket_size_mb)


def gradient_buckets(
    shape: ModelShape, element_bytes: int, bucket_size_mb: float | None
) -> list[Sequence[int]]:
    """Returns the tensor sizes of our buckets, in backward order.

    `bucket_size_mb` is the largest bucket in MiB; None for a single bucket.
    """
    backward = parameter_sizes(shape)[::-1]
    num_bytes = [element_bytes * aligned(size, element_bytes) for size in backward]
    cap_bytes = None if bucket_size_mb is None else bucket_size_mb * MIB
    return divide_into_buckets(backward, num_bytes, cap_bytes)


def layer_shapes(shape: ModelShape) -> list[list[tuple[int, int]]]:
    """Returns rows and columns of the parameters of every layer that is all-gathered separately."""
    shapes = parameter_shapes(shape)
    length = len(block_parameters(shape))
    last = 1 + shape.num_layers * length
    blocks = [shapes[at : at + length] for at in range(1, last, length)]
    return [[shapes[0]], *blocks, *([one] for one in shapes[last:])]


def layer_shard(layer: Sequence[tuple[int, int]], world_size: int, element_bytes: int) -> int:
    """Returns the number of elements of a rank's flat shard of a layer, sharded by rows."""
    return sum(
        aligned(-(-num_rows // world_size) * num_columns, element_bytes)
        for num_rows, num_columns in layer
    )


def _rows(shape: ModelShape, world_size: int, element_bytes: int, is_ours: bool) -> _Elements:
    """Shards every parameter by rows, as torch's fully_shard does, or as our container does."""
    ranks = np.arange(world_size)
    held, owned = np.zeros((2, world_size), dtype=np.int64)
    shapes = parameter_shapes(shape)
    for num_rows, num_columns in shapes:
        chunk = -(-num_rows // world_size)
        held += chunk * num_columns
        owned += np.clip(num_rows - chunk * ranks, 0, chunk) * num_columns
    gradients = held
    if is_ours:
        layers = layer_shapes(shape)
        held[:] = sum(layer_shard(layer, world_size, element_bytes) for layer in layers)
        gradients = held + sum(aligned(len(layer), element_bytes) for layer in layers)
    counters = np.full(world_size, len(shapes))
    return _Elements(held, gradients, num_moments=owned, num_counters=counters)
