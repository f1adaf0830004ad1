"""Reports the cost of restarts, after the first step that follows them."""

import time
from collections.abc import Sequence

from paceline.parallel.ranks.supervision.supervisor import Restart
from paceline.training.metrics.observers import Observer
from paceline.training.metrics.rows import RESTARTED, STARTED, EventRow, MetricsRow, StepRow


class RestartTeller:
    """Forwards rows, and adds an event per restart before the first step that follows.

    Args:
        observer: Receives the rows.
        restarts: Restarts not reported yet; the last one led to this attempt.
        joined_s: When this rank joined its process group.
    """

    def __init__(self, observer: Observer, restarts: Sequence[Restart], joined_s: float) -> None:
        self._observer = observer
        self._restarts = list(restarts)
        self._joined_s = self._loaded_s = joined_s
        self._step = 0

    def note(self, row: MetricsRow) -> None:
        """Forwards a row."""
        if isinstance(row, EventRow) and row.name == STARTED:
            self._loaded_s = time.monotonic()
            self._step = row.step
        elif isinstance(row, StepRow) and self._restarts:
            for restart in self._restarts:
                self._observer.note(self._event(restart, is_last=restart is self._restarts[-1]))
            self._restarts.clear()
        self._observer.note(row)

    def close(self) -> None:
        """Does nothing: a restart that no step followed is reported by a later attempt."""

    def _event(self, restart: Restart, *, is_last: bool) -> EventRow:
        failure = restart.failure
        details: dict[str, float | int | str] = {
            "restart": restart.number,
            "rank": failure.rank,
            "exit_code": failure.exit_code,
            "phase": failure.phase,
            "failed_after_step": failure.step,
            "silent_s": restart.silent_s,
            "noticed_s": restart.noticed_s,
            "wait_s": restart.started_s - restart.noticed_s,
        }
        now = time.monotonic()
        if is_last:
            details |= {
                "rendezvous_s": self._joined_s - restart.started_s,
                "load_s": self._loaded_s - self._joined_s,
                "first_step_s": now - self._loaded_s,
            }
        return EventRow(
            step=self._step,
            name=RESTARTED,
            message=f"from step {self._step:,}: {failure}",
            time_s=now - restart.noticed_s if is_last else None,
            details=details,
        )
