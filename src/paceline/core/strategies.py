"""The ways to keep ranks equal, by name."""

from typing import Literal

from paceline.core.errors import UsageError

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

BUCKET_STRATEGIES: tuple[StrategyName, ...] = (
    "bucketed",
    "torch_ddp",
    "sharded",
    "sharded_per_bucket",
)
"""Those that a bucket size makes a difference to."""

SHARDED_STATE: tuple[StrategyName, ...] = (
    "sharded_optimizer",
    "torch_zero",
    "torch_zero_view",
    "sharded",
    "sharded_per_bucket",
    "fully_sharded",
    "torch_fsdp2",
)
"""Those whose optimizer state is divided among the ranks."""

SHARDED_GRADIENTS: tuple[StrategyName, ...] = (
    "sharded",
    "sharded_per_bucket",
    "fully_sharded",
    "torch_fsdp2",
)
"""Those of them whose gradients are divided as well."""

SHARDED_PARAMETERS: tuple[StrategyName, ...] = ("fully_sharded", "torch_fsdp2")
"""Those of them whose parameters are divided as well."""

BucketSize = float | Literal["auto"]
"""In MiB; auto lets the container choose, where it can."""

DEFAULT_BUCKET_SIZE_MB = 25.0
"""In MiB, as torch's."""


def require_unscaled(strategies: tuple[StrategyName, ...], precision: str) -> None:
    """Raises if float16 is asked of a strategy whose gradients a loss scaler cannot see."""
    blind = [name for name in strategies if name in SHARDED_GRADIENTS]
    if precision == "float16" and blind:
        raise UsageError(
            f"--precision float16 scales the loss, which {blind[0]} cannot undo in divided "
            "gradients; use bfloat16"
        )
