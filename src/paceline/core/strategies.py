"""Names of the data-parallel strategies, which keep the ranks' weights equal; of collectives."""

import re
from typing import Literal, cast, get_args

from paceline.core.errors import UsageError, did_you_mean
from paceline.core.plan import Sharding

StrategyName = Literal[
    "none",
    "naive",
    "flat",
    "overlapped",
    "ddp",
    "torch_ddp",
    "zero1",
    "torch_zero",
    "zero2",
    "fsdp",
    "torch_fsdp2",
]

SHARDED_PARAMETERS: tuple[StrategyName, ...] = ("fsdp", "torch_fsdp2")
"""Strategies that shard parameters, gradients and optimizer state: ZeRO-3."""

SHARDED_GRADIENTS: tuple[StrategyName, ...] = ("zero2", *SHARDED_PARAMETERS)
"""Strategies that shard gradients and optimizer state: ZeRO-2 and ZeRO-3."""

SHARDED_STATE: tuple[StrategyName, ...] = ("zero1", "torch_zero", *SHARDED_GRADIENTS)
"""Strategies that shard the optimizer state: ZeRO-1, ZeRO-2 and ZeRO-3."""

BUCKET_STRATEGIES: tuple[StrategyName, ...] = ("ddp", "torch_ddp", "zero2")
"""Strategies that the bucket size affects."""

Compression = Literal["none", "bf16", "fp16", "int8", "int4", "powersgd"]
"""How gradients are made smaller before they are sent."""

COMPRESSIONS: dict[StrategyName, tuple[Compression, ...]] = {
    "ddp": ("bf16", "int8", "int4"),
    "zero2": ("bf16", "int8", "int4"),
    "torch_ddp": ("bf16", "fp16", "powersgd"),
}
"""The compressions of each strategy that has any."""

FORMER_NAMES: dict[str, StrategyName] = {
    "bucketed": "ddp",
    "sharded_optimizer": "zero1",
    "sharded": "zero2",
    "fully_sharded": "fsdp",
}
"""Names of earlier versions, which configs, flags and files may still have."""

_HINTS = {
    "zero3": "'fsdp' (ZeRO-3) or 'torch_fsdp2'",
    "fsdp2": "'torch_fsdp2'",
    "shardedperbucket": "'zero2', or 'fsdp' for less memory",
    "torchzeroview": "'torch_zero'",
}
"""Other names of strategies, and of removed ones, for the hint on an unknown name."""

_FORMER_IN_JSON = re.compile(
    rb'("(?:strategy|container|operation|subject|baseline)" ?: ?"(?:[^"]*[ ,])?)'
    rb'(%b)"' % "|".join(FORMER_NAMES).encode()
)

BucketSize = float | Literal["auto"]
"""Bucket size in MiB; auto lets the container choose, if it can."""

DEFAULT_BUCKET_SIZE_MB = 25.0
"""In MiB, the same as torch's default."""


def sharding_of(strategy: StrategyName) -> Sharding:
    """Returns the state that a strategy shards over the data-parallel ranks."""
    if strategy in SHARDED_PARAMETERS:
        return "parameters"
    if strategy in SHARDED_GRADIENTS:
        return "gradients"
    return "optimizer" if strategy in SHARDED_STATE else "none"


def find_strategy(name: str) -> StrategyName:
    """Returns a strategy by its name or former name; an error suggests the closest one."""
    known: tuple[str, ...] = get_args(StrategyName)
    name = FORMER_NAMES.get(name, name)
    if name in known:
        return cast(StrategyName, name)
    meant = _HINTS.get(name.lower().replace("-", "").replace("_", ""))
    hint = did_you_mean(name, known) if meant is None else f"did you mean {meant}? "
    raise UsageError(f"unknown strategy {name!r}; {hint}known: {', '.join(known)}")


def with_current_names(document: bytes) -> bytes:
    """Returns JSON with today's strategy names in the fields that name one.

    Records, plans and outcomes of earlier versions have the former names, also as the last word of
    a label, such as ``"2 ranks, bucketed"``.
    """
    return _FORMER_IN_JSON.sub(
        lambda found: found[1] + FORMER_NAMES[found[2].decode()].encode() + b'"', document
    )


def require_compression(strategy: StrategyName, compression: Compression) -> None:
    """Raises a `UsageError` if a strategy does not have a compression."""
    known = COMPRESSIONS.get(strategy, ())
    if compression == "none" or compression in known:
        return
    have = [name for name, compressions in COMPRESSIONS.items() if compression in compressions]
    own = f"{strategy} has {', '.join(known)}" if known else f"{strategy} has none"
    raise UsageError(
        f"compression {compression} is one of strategy {' and '.join(have)}, and {own}; change one "
        "of them"
    )


def require_unscaled(strategies: tuple[StrategyName, ...], precision: str) -> None:
    """Raises a `UsageError` for float16 with sharded gradients, which cannot be unscaled."""
    blind = [name for name in strategies if name in SHARDED_GRADIENTS]
    if precision == "float16" and blind:
        raise UsageError(
            f"--precision float16 scales the loss, and {blind[0]} cannot unscale sharded "
            "gradients; use bfloat16"
        )


Operation = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "reduce_to_owners",
    "gather_from_owners",
]
"""The last two are the reduce-scatter and all-gather of the sharded containers, implemented with
the cheapest calls of the backend."""
