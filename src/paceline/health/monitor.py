"""Monitors the steps of a run, and decides with the other ranks which updates are applied.

A loss far above recent ones, relative to their spread, is a spike.
"""

import collections
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist

from paceline.health.checksum import StateChecksum, StateTensor, compare_replicas
from paceline.health.config import SPIKE, STRAGGLER, HealthConfig
from paceline.health.hang import Watchdog
from paceline.health.stragglers import Stragglers
from paceline.parallel.ranks.collectives import from_all, reduce_numbers
from paceline.parallel.ranks.pending import waited_s

_STEPS = 100
_FEWEST_STEPS = 20
"""Minimum number of losses for a reliable spread."""
_NORMAL = 1.4826
"""Ratio of standard deviation to median absolute deviation in a normal distribution."""
_LEAST_SPREAD = 0.01
"""Minimum spread as a fraction of the median, so that ripples of a flat loss are not spikes."""


class HealthMonitor:
    """Guards the steps of a run; every rank creates one and makes the same calls.

    `tensors` returns this rank's weights and optimizer state. The watchdog knows how long this
    process was stopped. `replicas` are the ranks whose weights are equal, by default all.
    """

    def __init__(
        self,
        config: HealthConfig,
        tensors: Callable[[], list[StateTensor]],
        device: torch.device,
        world_size: int,
        watchdog: Watchdog,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._device = device
        self._world_size = world_size
        self._replicas = replicas
        self._checksum = StateChecksum(tensors, device) if config.hash_at_rest else None
        self._losses = RecentLosses(config.spike_threshold)
        self._stragglers: Stragglers | None = None
        if config.stragglers and world_size > 1:
            self._stragglers = Stragglers(device)
        self.watchdog = watchdog
        """Context manager to open around the steps."""
        self._began_s, self._waited_s = time.perf_counter(), waited_s()
        self.skip_reason: Literal["corrupted", "nonfinite", "spike"] | None = None
        """Why no rank has applied the last step; None if all have."""
        self.spike_limit: float | None = None
        """Spike limit that the last step's loss exceeds; None if it does not."""
        self.num_applied = 0
        """Number of applied steps."""

    def begin_step(self) -> None:
        """Starts to time this rank's own work in a step."""
        self._began_s, self._waited_s = time.perf_counter(), waited_s()

    def update_checksum(self) -> None:
        """Takes the checksum of this rank's state, after an update or a load."""
        if self._checksum is not None:
            self._checksum.update()

    def notes(self) -> Sequence[float]:
        """Returns this rank's numbers before an update, equally many on all ranks."""
        damaged = float(self._checksum is not None and self._checksum.is_damaged())
        if self._stragglers is None:
            return (damaged,)
        own_s = time.perf_counter() - self._began_s - (waited_s() - self._waited_s)
        return (damaged, *self._stragglers.notes(own_s, self.watchdog.take_stopped_s()))

    def should_apply(self, loss: float, gradient_norm: float, notes: Sequence[float]) -> bool:
        """Returns whether to apply the update.

        All ranks pass the same loss, gradient norm and sums of the ranks' notes.
        """
        num_damaged, *straggling = notes
        if self._stragglers is not None:
            self._stragglers.consider(straggling)
        limit = self._losses.limit
        self.spike_limit = limit if loss > limit else None
        self.skip_reason = None
        if num_damaged:
            self.skip_reason = "corrupted"
        elif not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            self.skip_reason = "nonfinite"
        elif self.spike_limit is not None and self._config.on_spike != "report":
            self.skip_reason = "spike"
        else:
            self._losses.add(loss)
            self.num_applied += 1
        return self.skip_reason is None

    def findings(self, step: int, loss: float) -> list[tuple[str, str]]:
        """Returns names and messages of events about an applied step; all ranks must call it."""
        found = [] if self._stragglers is None else self._stragglers.find(step)
        events = [(STRAGGLER, message) for message in found]
        if self.spike_limit is not None:
            events.append((SPIKE, f"loss {loss:.4g}, above the spike limit {self.spike_limit:.4g}"))
        return events

    def find_damage(self, step: int, *, at_once: bool) -> str | None:
        """Returns which ranks differ from the others, if the step is due for a check.

        `at_once` also checks between intervals: before a checkpoint, which must not contain
        corrupted state, and after a skipped step.
        """
        every = self._config.hash_every_steps
        if not every or self._world_size == 1 or not (at_once or step % every == 0):
            return None
        found = compare_replicas(self._tensors(), self._device, self._replicas)
        if self._replicas is not None:
            found = self._from_any_rank(found)
        if found is None or self._checksum is None:
            return found
        self._checksum.is_damaged()  # A rank whose state changed at rest is corrupted.
        return self._checksum.explain() or found

    def _from_any_rank(self, found: str | None) -> str | None:
        """Returns what the ranks have found that are replicas of each other, on all ranks."""
        (is_found,) = reduce_numbers([found is not None], dist.ReduceOp.MAX, self._device)
        if not is_found:
            return None
        return "; ".join(dict.fromkeys(each for each in from_all(found, None) if each is not None))

    def explain_corruption(self) -> str:
        """Returns which ranks' state changed at rest; all ranks must call it after a skip."""
        assert self._checksum is not None
        return self._checksum.explain()


class RecentLosses:
    """Losses of the most recent applied steps.

    A spike begins `threshold` standard deviations above their median.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._losses: collections.deque[float] = collections.deque(maxlen=_STEPS)

    def add(self, loss: float) -> None:
        """Adds the loss of an applied step."""
        self._losses.append(loss)

    @property
    def limit(self) -> float:
        """Loss above which a step is a spike; infinite until enough losses are known."""
        if len(self._losses) < _FEWEST_STEPS:
            return math.inf
        median = statistics.median(self._losses)
        deviation = _NORMAL * statistics.median(abs(loss - median) for loss in self._losses)
        return median + self._threshold * max(deviation, _LEAST_SPREAD * abs(median))
