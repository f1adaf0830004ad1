"""Whether ranks are started again after a failure, and when."""

import dataclasses

from paceline.core.errors import UsageError

_SAME_STEP = 3
"""Failures in a row at one step after which it is the step that fails, not the machine."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """How an attempt ended."""

    rank: int
    """Who failed first."""
    exit_code: int
    phase: str
    """What it was doing."""
    step: int
    """Steps of the run that were done by then; 0 before the first one of the attempt."""
    is_final: bool = False
    """Whether the rank says that starting again is of no use."""
    hung_s: float | None = None
    """How long it had given no sign of life, if that is why it was killed."""

    def __str__(self) -> str:
        where = f"in {self.phase} after step {self.step:,}" if self.step else f"in {self.phase}"
        if self.hung_s is not None:
            return f"rank {self.rank} sent no heartbeat for {self.hung_s:.0f} s, {where}"
        return f"rank {self.rank} ended with exit code {self.exit_code}, {where}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What follows from a failure."""

    restart: bool
    pause_s: float = 0.0
    """How long to wait before."""
    why: str = ""
    """Why not, or which restart it is."""


class RestartPolicy:
    """Decides after each failure of one run.

    Args:
        max_restarts: How often ranks are started again, at most.
    """

    def __init__(self, max_restarts: int) -> None:
        if max_restarts < 0:
            raise UsageError(f"--max-restarts {max_restarts} must not be negative")
        self._max_restarts = max_restarts
        self._num_restarts = 0
        self._last_step: int | None = None
        self._num_same = 0

    def judge(self, failure: Failure) -> Verdict:
        """Returns what to do; the first restart after progress comes at once.

        Args:
            failure: Of the attempt that has just ended.
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
