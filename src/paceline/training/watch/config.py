"""What of a run is watched. Torch-free, because the command line parses with it."""

import dataclasses
import math
from typing import Literal

from paceline.core.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """What is looked at while the run trains, and what is done about it."""

    hash_every_steps: int = 10
    """Steps between comparisons of what all ranks hold alike, weights and optimizer state; 0 for
    none. Before a checkpoint it is compared in any case."""
    hash_at_rest: bool = False
    """Also compare what each rank holds before an update with what the update before has left, in
    every step. Finds flipped bits of shards, and the rank where only two disagree."""
    on_corruption: Literal["stop", "rollback"] = "stop"
    """What to do when weights or optimizer state of a rank have changed by themselves: stop, or
    rollback to the last checkpoint."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """What to do about a loss or gradients that are not finite, with which no rank steps: stop,
    skip the batch, or rollback to the last checkpoint and skip the samples since."""
    on_spike: Literal["report", "skip", "rollback"] = "report"
    """What to do about a loss far above the last ones: report it and step all the same, or as for
    on_nonfinite."""
    spike_threshold: float = 10.0
    """Standard deviations above the median of the last 100 losses at which a spike begins, as
    their median absolute deviation has them."""
    most_in_a_row: int = 3
    """Batches that may be skipped one after another, and rollbacks to the same checkpoint, before
    the run stops."""
    stragglers: bool = True
    """Name a rank whose own work takes more than 1.3 times the median, or that was stopped."""
    step_timeout_s: float | None = None
    """Seconds after which a step that hangs ends the run; by default a collective does after
    parallel.timeout_s. The first step of a start may take longer."""

    def __post_init__(self) -> None:
        if self.hash_every_steps < 0:
            raise UsageError(f"watch.hash_every_steps {self.hash_every_steps} must not be negative")
        for name in ("spike_threshold", "most_in_a_row", "step_timeout_s"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise UsageError(f"watch.{name} {value} must be positive")
