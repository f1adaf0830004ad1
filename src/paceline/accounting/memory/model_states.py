"""What a device holds of a model while it trains: parameters, gradients, optimizer state.

With AdamW in the dtypes of a `Precision`, P parameters in T tensors, on n ranks:

    parameters        4P in float32; P/n of them where a strategy shards parameters (ZeRO-3)
    gradients         4P; P/n from ZeRO-2 on. Our containers' buckets hold 4 bytes per tensor more,
                      which tell whether a rank has a gradient for it
    optimizer state   two moments, 8P, and 4 bytes per tensor for its count of steps; the moments
                      of P/n parameters from ZeRO-1 on (Rajbhandari et al. 2020)

That is the rule; the numbers here are those of the tensors that ranks really hold, to the byte:

    buckets           every tensor begins at a multiple of 16 bytes
    shards            of a flat unit of tensors: all of them where only the optimizer shards them,
                      a bucket's where gradients are sharded. A unit is padded to n equal shards.
                      Whole units and gradients of shards have the padding; moments have not
    torch_zero        whole parameters, the largest first to the rank that has least
    torch_fsdp2       rows of every parameter, equally many to each rank but for the last ones;
                      parameters and gradients are padded to as many, moments are not
    fully_sharded     the same; each parameter's rows begin at a multiple of 16 bytes, and a layer's
                      gradients hold a number per tensor, as buckets do

Ranks differ by what their shards hold; the rank that holds most is reported.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.accounting.communication.buckets import (
    aligned,
    assign_largest_first,
    divide_into_buckets,
)
from paceline.accounting.memory.shards import cut_unit
from paceline.accounting.parameters import block_parameters
from paceline.core.specs import ModelShape, Precision, bytes_per_element
from paceline.core.strategies import (
    DEFAULT_BUCKET_SIZE_MB,
    SHARDED_GRADIENTS,
    SHARDED_PARAMETERS,
    SHARDED_STATE,
    StrategyName,
)
from paceline.core.units import MIB

_COUNTER_BYTES = 4
_OWN_BUCKETS = ("naive", "flat", "overlapped", "bucketed", "sharded_optimizer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelStates:
    """Bytes that outlive a step: `parameters`, `gradients`, `optimizer_state`; arrays by ranks."""

    parameters: Any
    gradients: Any
    optimizer_state: Any


def parameter_shapes(shape: ModelShape) -> list[tuple[int, int]]:
    """Returns rows and columns of every parameter of `TransformerLM`, in its order."""
    block = [*block_parameters(shape).values()]
    embedding = (shape.vocab_size, shape.d_model)
    head = [] if shape.tied_embeddings else [embedding]
    return [embedding, *block * shape.num_layers, (shape.d_model, 1), *head]


def parameter_sizes(shape: ModelShape) -> list[int]:
    """Returns the elements of every parameter of `TransformerLM` of this `shape`, in its order."""
    return [num_rows * num_columns for num_rows, num_columns in parameter_shapes(shape)]


def model_state_bytes(
    shape: ModelShape,
    precision: Precision,
    strategy: StrategyName,
    world_size: int,
    *,
    bucket_size_mb: float = DEFAULT_BUCKET_SIZE_MB,
) -> ModelStates:
    """Returns what one device keeps of the model; on the rank that keeps most.

    Of a model of this `shape` and `precision`, under a `strategy` on `world_size` ranks.
    `bucket_size_mb`, in MiB, makes a difference only where gradients are sharded, and there only to
    their padding.
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
    """Returns what every rank keeps of the model, as arrays by rank."""
    elements = _elements_held(shape, precision, strategy, world_size, bucket_size_mb)
    moments = elements.num_moments * 2 * bytes_per_element(precision.optimizer_state)
    return ModelStates(
        parameters=elements.num_parameters * bytes_per_element(precision.parameters),
        gradients=elements.num_gradients * bytes_per_element(precision.gradients),
        optimizer_state=moments + _COUNTER_BYTES * elements.num_counters,
    )


class _Elements(NamedTuple):
    """Numbers that every rank holds, by rank."""

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
        is_ours = strategy == "fully_sharded"
        return _rows(shape, world_size, bytes_per_element(precision.parameters), is_ours)
    if strategy in ("torch_zero", "torch_zero_view"):
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
        # What a rank owns of a bucket is one tensor to its optimizer.
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
    """Returns the sizes of the tensors of every unit, in the order in which they lie in it."""
    whole = strategy == "sharded_optimizer"
    return gradient_buckets(shape, element_bytes, None if whole else bucket_size_mb)


def gradient_buckets(
    shape: ModelShape, element_bytes: int, bucket_size_mb: float | None
) -> list[Sequence[int]]:
    """Returns the sizes of the tensors of our buckets, in the order of backward.

    `bucket_size_mb` is the largest bucket in MiB; None for one bucket.
    """
    backward = parameter_sizes(shape)[::-1]
    num_bytes = [element_bytes * aligned(size, element_bytes) for size in backward]
    cap_bytes = None if bucket_size_mb is None else bucket_size_mb * MIB
    return divide_into_buckets(backward, num_bytes, cap_bytes)


def layer_shapes(shape: ModelShape) -> list[list[tuple[int, int]]]:
    """Returns rows and columns of the parameters of every layer that is gathered by itself."""
    shapes = parameter_shapes(shape)
    length = len(block_parameters(shape))
    last = 1 + shape.num_layers * length
    blocks = [shapes[at : at + length] for at in range(1, last, length)]
    return [[shapes[0]], *blocks, *([one] for one in shapes[last:])]


def layer_shard(layer: Sequence[tuple[int, int]], world_size: int, element_bytes: int) -> int:
    """Returns the elements of a rank's flat shard of a layer, which is divided by rows."""
    return sum(
        aligned(-(-num_rows // world_size) * num_columns, element_bytes)
        for num_rows, num_columns in layer
    )


def _rows(shape: ModelShape, world_size: int, element_bytes: int, is_ours: bool) -> _Elements:
    """Divides every parameter by rows, as torch's fully_shard does, or as ours."""
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
