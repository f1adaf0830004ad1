"""The sequence of collectives with which each strategy reduces gradients."""

from collections.abc import Sequence
from typing import NamedTuple

from paceline.accounting.communication.buckets import aligned, divide_as_torch, divide_into_buckets
from paceline.accounting.memory.shards import cut_unit
from paceline.core.collectives import Operation
from paceline.core.errors import UsageError
from paceline.core.strategies import BUCKET_STRATEGIES, DEFAULT_BUCKET_SIZE_MB, StrategyName
from paceline.core.units import MIB

_FLOAT32_BYTES = 4
_PER_PARAMETER: tuple[StrategyName, ...] = ("naive", "overlapped")


class GradientCollective(NamedTuple):
    """One collective of a step."""

    operation: Operation
    num_bytes: int
    parameters: Sequence[int]
    """Indices of the parameters whose gradients it holds; empty for a message of flags only."""


def gradient_collectives(
    strategy: StrategyName,
    parameter_sizes: Sequence[int],
    world_size: int,
    bucket_size_mb: float | None = None,
) -> list[GradientCollective]:
    """Returns the collectives of a float32 step in launch order.

    `parameter_sizes` are element counts in the model's order. `bucket_size_mb` is the bucket size
    limit in MiB; None selects the strategy's default.
    """
    if bucket_size_mb is not None and strategy not in BUCKET_STRATEGIES:
        raise UsageError(f"strategy {strategy!r} has no buckets, so no bucket size applies to it")
    cap_bytes = None if bucket_size_mb is None else bucket_size_mb * MIB
    indices = range(len(parameter_sizes) - 1, -1, -1)
    if strategy == "torch_ddp":
        num_bytes = [_FLOAT32_BYTES * size for size in parameter_sizes]
        return [
            GradientCollective("all_reduce", sum(num_bytes[index] for index in group), group)
            for group in divide_as_torch(indices, num_bytes[::-1], cap_bytes)
        ]
    filled = [aligned(size, _FLOAT32_BYTES) for size in parameter_sizes]
    if strategy in _PER_PARAMETER:
        cap_bytes = 0.0
    elif strategy != "flat" and cap_bytes is None:
        cap_bytes = DEFAULT_BUCKET_SIZE_MB * MIB
    num_bytes = [_FLOAT32_BYTES * size for size in filled]
    groups = divide_into_buckets(indices, num_bytes[::-1], cap_bytes)
    messages = []
    for group in groups:
        if strategy == "sharded":
            # Buckets are padded to equal shards.
            unit = [parameter_sizes[index] for index in group]
            padded = world_size * cut_unit(unit, world_size, _FLOAT32_BYTES).share
            messages.append(GradientCollective("reduce_to_owners", _FLOAT32_BYTES * padded, group))
        else:
            # After the gradients, one flag per parameter says whether this rank has a gradient.
            size = sum(num_bytes[index] for index in group) + _FLOAT32_BYTES * len(group)
            messages.append(GradientCollective("all_reduce", size, group))
    if strategy == "sharded":
        # One flag per parameter: whether any rank has its gradient.
        messages.append(GradientCollective("all_reduce", _FLOAT32_BYTES * len(parameter_sizes), ()))
    return messages
