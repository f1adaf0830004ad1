"""The ways to keep ranks equal, by name."""

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
    "torch_zero_view",
    "sharded",
    "sharded_per_bucket",
    "fully_sharded",
    "torch_fsdp2",
]

SHARDED_PARAMETERS: tuple[StrategyName, ...] = ("fully_sharded", "torch_fsdp2")
"""Those that shard parameters, gradients and the optimizer state: ZeRO-3."""

_PER_BUCKET: tuple[StrategyName, ...] = ("sharded", "sharded_per_bucket")
SHARDED_GRADIENTS = (*_PER_BUCKET, *SHARDED_PARAMETERS)
"""Those that shard gradients and the optimizer state: ZeRO-2 and 3."""

SHARDED_STATE = ("sharded_optimizer", "torch_zero", "torch_zero_view", *SHARDED_GRADIENTS)
"""Those that shard the optimizer state: ZeRO-1, 2 and 3."""

BUCKET_STRATEGIES = ("bucketed", "torch_ddp", *_PER_BUCKET)
"""Those that a bucket size makes a difference to."""

_ALIASES = {
    "ddp": "'torch_ddp' or our 'bucketed'",
    "zero1": "'sharded_optimizer' (ZeRO-1)",
    "zero2": "'sharded' (ZeRO-2)",
    "zero3": "'fully_sharded' (ZeRO-3)",
    "fsdp": "'fully_sharded' or 'torch_fsdp2'",
    "fsdp2": "'torch_fsdp2'",
}
"""What others call the strategies, for the hint to a name that is unknown."""

BucketSize = float | Literal["auto"]
"""In MiB; auto lets the container choose, where it can."""

DEFAULT_BUCKET_SIZE_MB = 25.0
"""In MiB, as torch's."""


def sharding_of(strategy: StrategyName) -> Sharding:
    """Returns what a strategy shards over the data-parallel ranks."""
    if strategy in SHARDED_PARAMETERS:
        return "parameters"
    if strategy in SHARDED_GRADIENTS:
        return "gradients"
    return "optimizer" if strategy in SHARDED_STATE else "none"


def find_strategy(name: str) -> StrategyName:
    """Returns a strategy; an unknown name is an error with the nearest one and all known."""
    known: tuple[str, ...] = get_args(StrategyName)
    if name in known:
        return cast(StrategyName, name)
    alias = _ALIASES.get(name.lower().replace("-", "").replace("_", ""))
    hint = did_you_mean(name, known) if alias is None else f"did you mean {alias}? "
    raise UsageError(f"unknown strategy {name!r}; {hint}known: {', '.join(known)}")


def require_unscaled(strategies: tuple[StrategyName, ...], precision: str) -> None:
    """Raises if float16 is asked of a strategy whose gradients a loss scaler cannot see."""
    blind = [name for name in strategies if name in SHARDED_GRADIENTS]
    if precision == "float16" and blind:
        raise UsageError(
            f"--precision float16 scales the loss, and {blind[0]} cannot unscale sharded "
            "gradients; use bfloat16"
        )
