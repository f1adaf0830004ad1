"""What a strategy sends of the gradients, message by message."""

from collections.abc import Sequence
from typing import NamedTuple

from paceline.accounting.bucket_division import aligned, bucket_lengths, torch_bucket_lengths
from paceline.core.errors import UsageError
from paceline.core.strategies import BUCKET_STRATEGIES, StrategyName
from paceline.core.units import MIB

DEFAULT_BUCKET_MB = 25.0
_FLOAT32_BYTES = 4
_PER_PARAMETER: tuple[StrategyName, ...] = ("naive", "overlapped")


class Message(NamedTuple):
    """One message of a step."""

    num_bytes: int
    parameters: tuple[int, ...]
    """Places in the model's list."""


def gradient_messages(
    strategy: StrategyName, parameter_sizes: Sequence[int], bucket_size_mb: float | None
) -> list[Message]:
    """Returns the messages of a step in float32, in the order of their launch.

    Args:
        strategy: One that averages gradients, all or their owners' share.
        parameter_sizes: Elements of each parameter, in the model's order.
        bucket_size_mb: Largest bucket in MiB; None for the strategy's own default.
    """
    if bucket_size_mb is not None and strategy not in BUCKET_STRATEGIES:
        raise UsageError(f"strategy {strategy!r} has no buckets, so no bucket size applies to it")
    cap_bytes = (bucket_size_mb or DEFAULT_BUCKET_MB) * MIB
    places = range(len(parameter_sizes) - 1, -1, -1)
    if strategy in ("torch_ddp", "torch_zero", "torch_zero_view"):
        sizes = [_FLOAT32_BYTES * parameter_sizes[place] for place in places]
        return [
            Message(sum(_FLOAT32_BYTES * parameter_sizes[place] for place in group), group)
            for group in _groups(places, torch_bucket_lengths(sizes, cap_bytes))
        ]
    filled = [aligned(size, _FLOAT32_BYTES) for size in parameter_sizes]
    cap: float | None = 0.0 if strategy in _PER_PARAMETER else cap_bytes
    if strategy == "flat":
        cap = None
    lengths = bucket_lengths([_FLOAT32_BYTES * filled[place] for place in places], cap)
    # Behind the gradients, one number per parameter tells whether this rank has one.
    return [
        Message(_FLOAT32_BYTES * (sum(filled[place] for place in group) + len(group)), group)
        for group in _groups(places, lengths)
    ]


def _groups(places: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, ...]]:
    groups = []
    start = 0
    for length in lengths:
        groups.append(tuple(places[start : start + length]))
        start += length
    return groups
