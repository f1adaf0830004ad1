"""Watches the steps of a run, and decides with the other ranks which updates are applied.

Detects loss spikes: losses far above recent ones, relative to their spread.
"""

import collections
import math
import statistics
import time
from collections.abc import Sequence
from typing import Literal

from paceline.parallel import Session
from paceline.parallel.ranks.pending import waited_s
from paceline.training.config import RunConfig
from paceline.training.health.checksum import AtRest, compare_replicas
from paceline.training.health.hang import Watchdog
from paceline.training.health.stragglers import Stragglers
from paceline.training.metrics import SPIKE, STRAGGLER
from paceline.training.parallelize import Trainee
from paceline.training.step import StepResult

_STEPS = 100
_FEWEST_STEPS = 20
"""Minimum number of losses for a reliable spread."""
_NORMAL = 1.4826
"""Ratio of standard deviation to median absolute deviation in a normal distribution."""
_LEAST_SPREAD = 0.01
"""Minimum spread as a fraction of the median, so that ripples of a flat loss are not spikes."""


class RecentLosses:
    """Losses of the most recent applied steps.

    Args:
        threshold: Standard deviations above the median at which a spike begins.
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


Refusal = Literal["corrupted", "nonfinite", "spike"]


class Watch:
    """Guards the steps of a run; every rank creates one and makes the same calls.

    Args:
        config: The run.
        session: Distributed session of this rank.
        trainee: The model and its optimizers.
    """

    def __init__(self, config: RunConfig, session: Session, trainee: Trainee) -> None:
        self._config = config.watch
        self._session = session
        self._trainee = trainee
        self._at_rest = AtRest(trainee, session.device) if config.watch.hash_at_rest else None
        self._losses = RecentLosses(config.watch.spike_threshold)
        self._stragglers: Stragglers | None = None
        if config.watch.stragglers and session.world_size > 1:
            self._stragglers = Stragglers(session.device)
        self.dog = Watchdog(config, session)
        """Context manager to open around the steps."""
        self._began_s, self._waited_s = time.perf_counter(), waited_s()
        self.refusal: Refusal | None = None
        """Why no rank has applied the last step; None if all have."""
        self.spike_limit: float | None = None
        """Spike limit that the last step's loss exceeds; None if it does not."""
        self.num_taken = 0
        """Number of applied steps."""

    def begin_step(self) -> None:
        """Starts to time this rank's own work in a step."""
        self._began_s, self._waited_s = time.perf_counter(), waited_s()

    def hold(self) -> None:
        """Hashes this rank's state, after an update or a load."""
        if self._at_rest is not None:
            self._at_rest.keep()

    def notes(self) -> Sequence[float]:
        """Returns this rank's notes before an update."""
        damaged = float(self._at_rest is not None and self._at_rest.is_damaged())
        if self._stragglers is None:
            return (damaged,)
        own_s = time.perf_counter() - self._began_s - (waited_s() - self._waited_s)
        return (damaged, *self._stragglers.notes(own_s, self.dog.take_stopped_s()))

    def accepts(self, result: StepResult) -> bool:
        """Returns whether to apply the update."""
        num_damaged, *straggling = result.notes
        if self._stragglers is not None:
            self._stragglers.consider(straggling)
        limit = self._losses.limit
        self.spike_limit = limit if result.loss > limit else None
        self.refusal = None
        if num_damaged:
            self.refusal = "corrupted"
        elif not result.is_finite:
            self.refusal = "nonfinite"
        elif self.spike_limit is not None and self._config.on_spike != "report":
            self.refusal = "spike"
        else:
            self._losses.add(result.loss)
            self.num_taken += 1
        return self.refusal is None

    def findings(self, step: int, result: StepResult) -> list[tuple[str, str]]:
        """Returns events about an applied step; all ranks must call it.

        Args:
            step: Number of completed steps.
            result: Result of the last step.
        """
        found = [] if self._stragglers is None else self._stragglers.find(step)
        events = [(STRAGGLER, message) for message in found]
        if self.spike_limit is not None:
            events.append(
                (SPIKE, f"loss {result.loss:.4g}, above the spike limit {self.spike_limit:.4g}")
            )
        return events

    def find_damage(self, step: int, *, at_once: bool) -> str | None:
        """Returns which ranks differ from the others, if the step is due for a check.

        Args:
            step: Number of completed steps.
            at_once: Whether to check between intervals: before a checkpoint, which must not contain
                corrupted state, and after a rejected step.
        """
        every = self._config.hash_every_steps
        if not every or self._session.world_size == 1 or not (at_once or step % every == 0):
            return None
        found = compare_replicas(self._trainee, self._session.device)
        if found is None or self._at_rest is None:
            return found
        self._at_rest.is_damaged()  # A rank whose state changed at rest is corrupted.
        return self._at_rest.explain() or found

    def explain_corruption(self) -> str:
        """Returns which ranks' state changed at rest; all ranks must call it after a refusal."""
        assert self._at_rest is not None
        return self._at_rest.explain()
