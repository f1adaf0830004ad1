"""The ways to keep ranks equal, by name."""

from typing import Literal

StrategyName = Literal["none", "naive", "flat", "overlapped", "bucketed", "torch_ddp"]

BUCKET_STRATEGIES: tuple[StrategyName, ...] = ("bucketed", "torch_ddp")
"""Those that a bucket size makes a difference to."""

BucketSize = float | Literal["auto"]
"""In MiB; auto lets the container choose, where it can."""
