"""Watches this rank from a separate thread, and identifies the rank at fault when a step hangs.

1. A step exceeds its timeout, or a collective fails. Every rank that notices writes its stacks, and
   answers a roll call.
2. The lowest rank that answered reports which ranks did not answer or are behind: one message, one
   event.
3. The ranks exit, with a code that says that a restart may help.

The thread also detects that its process was stopped, by a gap between two of its own ticks.
"""

import itertools
import os
import pathlib
import sys
import threading
import time
from typing import NoReturn, Self

import torch.distributed as dist

from paceline.core.units import format_seconds
from paceline.parallel import CollectiveError, Session
from paceline.parallel.ranks.supervision.heartbeats import Phase, own_heartbeat
from paceline.training.config import RunConfig
from paceline.training.metrics.rows import LOST, EventRow, MetricsFile
from paceline.training.run_files import METRICS, STACKS
from paceline.training.watch.errors import LostRankError
from paceline.training.watch.roll_call import Presence, RollCall, blame
from paceline.training.watch.stacks import dump_stacks, last_collective

_TICK_S = 0.25
_PATIENCE_S = 3.0
"""How long a hanging rank waits for answers from the others, which hang as well."""
_FAILED_PATIENCE_S = 1.5
"""The same after a failed collective, which others notice at once; it delays the restart."""
_FIRST_SPEAKS_S = 0.5
"""How long other ranks wait before they exit, so that the report is not cut off."""
_STOPPED_S = 1.0
"""Delay of a tick from which the process counts as stopped."""
_STEP_PHASES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.ALL_REDUCE, Phase.UPDATE)
_numbers = itertools.count()


class Watchdog:
    """Watches the main thread while it is open; every rank must open one.

    Args:
        config: The run.
        session: Distributed session of this rank.
    """

    def __init__(self, config: RunConfig, session: Session) -> None:
        self._timeout_s = config.watch.step_timeout_s
        self._directory = pathlib.Path(config.out)
        self._session = session
        self._resumed_s = 0.0
        """When this process last resumed after being stopped; waiting counts from then on."""
        self._call = RollCall(next(_numbers))
        self._over = threading.Event()
        self._stopped_s = 0.0
        self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._over.set()
        self._thread.join()
        if error is not None and self._session.world_size > 1 and is_lost_peer(error):
            what = f"a collective has failed ({_reason(error)})"
            message, is_first = self._find_culprit(what, _FAILED_PATIENCE_S)
            if is_first:
                raise LostRankError(message) from error
            time.sleep(_FIRST_SPEAKS_S)
            raise SystemExit(LostRankError.exit_code) from error

    def take_stopped_s(self) -> float:
        """Returns how long this process was stopped since the last call."""
        stopped_s, self._stopped_s = self._stopped_s, 0.0
        return stopped_s

    def _look(self) -> None:
        before = time.monotonic()
        while not self._over.wait(_TICK_S):
            now = time.monotonic()
            if now - before - _TICK_S > _STOPPED_S:
                self._stopped_s += now - before - _TICK_S
                self._resumed_s = now
            before = now
            limit_s = self._timeout_s
            heartbeat = own_heartbeat()
            # The first step compiles and allocates, so it has no timeout.
            is_timed = heartbeat.phase in _STEP_PHASES and heartbeat.num_steps > 0
            if limit_s is not None and is_timed and self._waited_s() > limit_s:
                self._leave(f"no step within {format_seconds(limit_s)}")

    def _waited_s(self) -> float:
        """Returns how long the main thread has been in its current phase."""
        return time.monotonic() - max(own_heartbeat().time_s, self._resumed_s)

    def _leave(self, what: str) -> NoReturn:
        """Ends this process from the watchdog's thread; the main thread may never return."""
        try:
            message, is_first = self._find_culprit(what, _PATIENCE_S)
            if is_first:
                sys.stderr.write(f"paceline: error: {message}\n")
                sys.stderr.flush()
            else:
                time.sleep(_FIRST_SPEAKS_S)
        finally:
            os._exit(LostRankError.exit_code)

    def _find_culprit(self, what: str, patience_s: float) -> tuple[str, bool]:
        """Returns the message, and whether this rank reports it; writes the event if so."""
        rank, heartbeat = self._session.rank, own_heartbeat()
        own = Presence(
            rank=rank,
            step=heartbeat.step,
            phase=str(heartbeat.phase),
            waited_s=self._waited_s(),
            collective=last_collective(),
        )
        dump_stacks(self._directory / STACKS, rank)
        answers = self._call.answers(own, patience_s)
        is_first = rank == min(each.rank for each in answers if each is not None)
        message = f"{what}: {blame(answers, patience_s)}; stacks in {self._directory / STACKS}"
        if is_first:
            row = EventRow(step=heartbeat.step, name=LOST, message=message)
            MetricsFile(self._directory / METRICS).append(row)
        return message, is_first


def is_lost_peer(error: BaseException) -> bool:
    """Returns whether an error means that a collective failed or timed out."""
    if isinstance(error, CollectiveError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and ("gloo/" in str(error) or "NCCL" in str(error))


def _reason(error: BaseException) -> str:
    """Returns torch's message without its source location and advice."""
    text = str(error).partition("\n")[0]
    return text.rpartition("] ")[2].partition(". This may")[0]
