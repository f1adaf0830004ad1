"""Names of the data-parallel strategies, which keep the ranks' weights equal; of collectives."""

from typing import Literal, cast, get_args

from paceline.core.errors import UsageError, did_you_mean
from paceline.core.plan import Sharding

StrategyName = Literal[
    "none",
    "naive",
    "flat",
    "overlapped",
    "bucketed",
    "torch_ddp",
    "sharded_optimizer",
    "torch_zero",
    "sharded",
    "fully_sharded",
    "torch_fsdp2",
]

SHARDED_PARAMETERS: tuple[StrategyName, ...] = ("fully_sharded", "torch_fsdp2")
"""Strategies that shard parameters, gradients and optimizer state: ZeRO-3."""

SHARDED_GRADIENTS: tuple[StrategyName, ...] = ("sharded", *SHARDED_PARAMETERS)
"""Strategies that shard gradients and optimizer state: ZeRO-2 and ZeRO-3."""

SHARDED_STATE: tuple[StrategyName, ...] = ("sharded_optimizer", "torch_zero", *SHARDED_GRADIENTS)
"""Strategies that shard the optimizer state: ZeRO-1, ZeRO-2 and ZeRO-3."""

BUCKET_STRATEGIES: tuple[StrategyName, ...] = ("bucketed", "torch_ddp", "sharded")
"""Strategies that the bucket size affects."""

_ALIASES = {
    "ddp": "'torch_ddp' or our 'bucketed'",
    "zero1": "'sharded_optimizer' (ZeRO-1)",
    "zero2": "'sharded' (ZeRO-2)",
    "zero3": "'fully_sharded' (ZeRO-3)",
    "fsdp": "'fully_sharded' or 'torch_fsdp2'",
    "fsdp2": "'torch_fsdp2'",
    "shardedperbucket": "'sharded', or 'fully_sharded' for less memory",
    "torchzeroview": "'torch_zero'",
}
"""Names of the strategies elsewhere and in earlier versions, for the hint on an unknown name."""

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
    """Returns a strategy by name; the error for an unknown name suggests the closest one."""
    known: tuple[str, ...] = get_args(StrategyName)
    if name in known:
        return cast(StrategyName, name)
    alias = _ALIASES.get(name.lower().replace("-", "").replace("_", ""))
    hint = did_you_mean(name, known) if alias is None else f"did you mean {alias}? "
    raise UsageError(f"unknown strategy {name!r}; {hint}known: {', '.join(known)}")


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
