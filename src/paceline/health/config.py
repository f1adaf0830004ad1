"""Config of the health checks, and names of their events; loads without torch."""

import dataclasses
import math
from typing import Literal

from paceline.core.errors import UsageError

SPIKE = "spike"
"""Event of a loss spike whose update was applied."""
STRAGGLER = "straggler"
"""Event of a rank that slows down the others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """Detection of corruption, bad losses, stragglers and hangs, and the response to them."""

    hash_every_steps: int = 10
    """Steps between comparisons of replicated weights and optimizer state across ranks, which are
    also compared before each checkpoint; 0 for no comparison at all."""
    hash_at_rest: bool = False
    """In every step, also check that the state of each rank is unchanged since its last update.
    This finds flipped bits in shards, and names the corrupted rank even if there are only two."""
    on_corruption: Literal["stop", "rollback"] = "stop"
    """Response to silent corruption of weights or optimizer state: stop, or rollback to the last
    checkpoint."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """Response to a loss or gradients that are not finite, which no rank applies: stop, skip the
    batch, or rollback to the last checkpoint and skip the samples since then."""
    on_spike: Literal["report", "skip", "rollback"] = "report"
    """Response to a loss spike: report it and apply the update, or skip or rollback as in
    on_nonfinite."""
    spike_threshold: float = 10.0
    """Standard deviations above the median of the last 100 losses that make a loss a spike,
    estimated from the median absolute deviation of these losses."""
    most_in_a_row: int = 3
    """Maximum number of consecutive skipped batches, or of rollbacks to the same checkpoint, before
    the run stops."""
    stragglers: bool = True
    """Report a rank whose own work takes more than 1.3 times the median, or that was stopped."""
    step_timeout_s: float | None = None
    """Seconds after which a hanging step ends the run; by default, only a collective that exceeds
    parallel.timeout_s does, or such a step on an accelerator. The first step after each start may
    take longer."""

    def __post_init__(self) -> None:
        if self.hash_every_steps < 0:
            raise UsageError(f"watch.hash_every_steps {self.hash_every_steps} must not be negative")
        for name in ("spike_threshold", "most_in_a_row", "step_timeout_s"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise UsageError(f"watch.{name} {value} must be positive")
