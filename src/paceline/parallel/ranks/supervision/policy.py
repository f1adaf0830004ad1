"""The policy that decides whether and when ranks restart after a failure."""

import dataclasses

from paceline.core.errors import UsageError

_SAME_STEP = 3
"""Consecutive failures at one step after which the step, not the machine, is to blame."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure that ended an attempt."""

    rank: int
    """The rank that failed first."""
    exit_code: int
    phase: str
    """The phase that it was in."""
    step: int
    """Completed steps of the run; 0 if the attempt had completed none."""
    is_final: bool = False
    """Whether the rank reported that a restart would fail in the same way."""
    hung_s: float | None = None
    """Seconds since its last heartbeat, if it was killed for hanging."""

    def __str__(self) -> str:
        where = f"in {self.phase} after step {self.step:,}" if self.step else f"in {self.phase}"
        if self.hung_s is not None:
            return f"rank {self.rank} sent no heartbeat for {self.hung_s:.0f} s, {where}"
        return f"rank {self.rank} ended with exit code {self.exit_code}, {where}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The decision after a failure."""

    restart: bool
    pause_s: float = 0.0
    """Pause before the restart."""
    why: str = ""
    """The reason against a restart, or the number of the restart."""


class RestartPolicy:
    """Decides after each failure of one run whether to restart its ranks.

    Args:
        max_restarts: Maximum number of restarts.
    """

    def __init__(self, max_restarts: int) -> None:
        if max_restarts < 0:
            raise UsageError(f"--max-restarts {max_restarts} must not be negative")
        self._max_restarts = max_restarts
        self._num_restarts = 0
        self._last_step: int | None = None
        self._num_same = 0

    def judge(self, failure: Failure) -> Verdict:
        """Returns the decision; the first restart after progress has no pause.

        Args:
            failure: The failure of the attempt that has just ended.
        """
        if failure.is_final or failure.exit_code == UsageError.exit_code:
            return Verdict(restart=False, why="a restart would not help")
        self._num_same = self._num_same + 1 if failure.step == self._last_step else 1
        self._last_step = failure.step
        if self._num_same >= _SAME_STEP:
            where = f"step {failure.step + 1:,}" if failure.step else "its first step"
            return Verdict(
                restart=False, why=f"failed {_SAME_STEP} times in a row before {where} was done"
            )
        if self._num_restarts >= self._max_restarts:
            return Verdict(restart=False, why=f"given up after {self._num_restarts} restarts")
        self._num_restarts += 1
        pause_s = 0.0
        if self._num_same > 1:
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (self._num_same - 2))
        return Verdict(
            restart=True,
            pause_s=pause_s,
            why=f"restart {self._num_restarts} of at most {self._max_restarts}",
        )
