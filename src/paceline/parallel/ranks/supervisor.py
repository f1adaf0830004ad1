"""Supervisor that forks the ranks of one host and restarts them after failures.

A rank that dies breaks the process group of all ranks. The slow part of a restart is not creating
processes but importing torch. The supervisor runs no training itself and keeps torch imported, so
forking new ranks takes milliseconds. New processes have no aborted groups, no half-finished
messages and no memory of a failed attempt. Surviving ranks are killed at any point; checkpoints are
safe against that.

Until all ranks have exited successfully:

1. Fork the ranks; they rendezvous in a file that only this attempt uses.
2. Wait until a rank fails, hangs or stops on request. Forward signals to the ranks.
3. Kill the other ranks. Restart, or print the reason for not restarting.

Ranks die with the supervisor, even if it is killed.

The policy that decides whether and when ranks restart after a failure.
"""

import contextlib
import dataclasses
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import torch

from paceline.core.errors import UsageError
from paceline.core.host import threads_per_rank
from paceline.core.processes import (
    ENDED_BY_REQUEST,
    STOP_CODES,
    STOPPED,
    ForkedProcess,
    SignalForwarder,
    back_off_s,
    die_with_parent,
    exit_code_of,
    stop_code,
    stop_signals,
)
from paceline.parallel.ranks.heartbeats import Heartbeats
from paceline.parallel.ranks.placement import RENDEZVOUS_FILE
from paceline.parallel.ranks.rendezvous import rendezvous_path

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
    """Decides after each failure of one run whether to restart its ranks."""

    def __init__(self, max_restarts: int) -> None:
        if max_restarts < 0:
            raise UsageError(f"--max-restarts {max_restarts} must not be negative")
        self._max_restarts = max_restarts
        self._num_restarts = 0
        self._last_step: int | None = None
        self._num_same = 0

    def judge(self, failure: Failure) -> Verdict:
        """Returns the decision; the first restart after progress has no pause."""
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
        return Verdict(
            restart=True,
            pause_s=back_off_s(self._num_same - 1, _FIRST_PAUSE_S, _LONGEST_PAUSE_S),
            why=f"restart {self._num_restarts} of at most {self._max_restarts}",
        )


_POLL_INTERVAL_S = 0.005
_EXCEPTION = 1
"""Exit code of an exception, such as a lost peer: a peer with another exit code is to blame."""
_BLAME_S = 1.0
_SUSPENDED_S = 5.0
"""A gap between polls after which the supervisor itself must have been suspended (Ctrl-Z)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restart:
    """One restart that the metrics of the run do not contain yet."""

    number: int
    failure: Failure
    silent_s: float
    """Time from the failed rank's last heartbeat to the detection of its failure."""
    noticed_s: float
    """Time of detection, on the monotonic clock that all processes of a host share."""
    started_s: float
    """Time at which the new ranks were started."""


def supervise(
    run_rank: Callable[[tuple[Restart, ...]], int],
    *,
    num_ranks: int,
    max_restarts: int,
    hang_s: float,
    grace_s: float,
) -> int:
    """Runs ranks, with restarts, until they succeed or give up; returns the exit code.

    `run_rank` is called in each rank's process, with the restarts that the metrics do not contain
    yet, and returns the exit code; environment variables identify the rank. A rank without a
    heartbeat for `hang_s` counts as hung. Ranks have `grace_s` to exit after a request to stop.
    """
    supervisor = _Supervisor(run_rank, num_ranks, hang_s, grace_s)
    policy = RestartPolicy(max_restarts)
    unlogged: tuple[Restart, ...] = ()
    number = 0
    gc.freeze()  # Collecting existing objects in a rank would copy pages shared by the fork.
    with SignalForwarder() as requests:
        while True:
            ending = supervisor.run_attempt(unlogged, requests)
            if isinstance(ending, int):
                return ending
            noticed_s = time.monotonic()
            verdict = policy.judge(ending)
            sys.stderr.write(f"paceline: {ending}; {verdict.why}\n")
            if not verdict.restart:
                return ending.exit_code
            if requests.come_within(verdict.pause_s):
                return stop_code()
            if supervisor.heartbeats[0].num_steps:
                unlogged = ()
            number += 1
            restart = Restart(
                number=number,
                failure=ending,
                silent_s=noticed_s - supervisor.heartbeats[ending.rank].time_s,
                noticed_s=noticed_s,
                started_s=time.monotonic(),
            )
            unlogged = (*unlogged, restart)


class _Supervisor:
    def __init__(
        self,
        run_rank: Callable[[tuple[Restart, ...]], int],
        num_ranks: int,
        hang_s: float,
        grace_s: float,
    ) -> None:
        self._run_rank = run_rank
        self._num_ranks = num_ranks
        self._hang_s = hang_s
        self._grace_s = grace_s
        self.heartbeats = Heartbeats.for_ranks(num_ranks)

    def run_attempt(
        self, unlogged: tuple[Restart, ...], requests: SignalForwarder
    ) -> Failure | int:
        """Runs all ranks once; returns their failure, or the exit code if none failed."""
        self.heartbeats.reset()
        ranks: dict[int, ForkedProcess] = {}
        with rendezvous_path() as path:
            try:
                for rank in range(self._num_ranks):
                    ranks[rank] = self._fork(rank, path, unlogged)
                return self._wait(ranks, requests)
            finally:
                for process in ranks.values():
                    process.kill()

    def _wait(self, ranks: dict[int, ForkedProcess], requests: SignalForwarder) -> Failure | int:
        code, deadline = 0, None
        lost: Failure | None = None
        blame_until = 0.0
        now = awake_s = time.monotonic()
        while ranks:
            is_asked = requests.send_to(ranks.values())
            ended = [
                (self.heartbeats[rank].time_s, rank, return_code)
                for rank, process in ranks.items()
                if (return_code := process.poll()) is not None
            ]
            # Of several, the oldest heartbeat first: the others waited for that rank, and lost it.
            for _, rank, return_code in sorted(ended):
                del ranks[rank]
                if return_code in STOP_CODES or (deadline and return_code in ENDED_BY_REQUEST):
                    is_asked, code = True, STOPPED
                elif return_code not in (0, _EXCEPTION):
                    return self._failure(rank, exit_code_of(return_code))
                elif return_code == _EXCEPTION and code != STOPPED and lost is None:
                    lost = self._failure(rank, return_code)
                    blame_until = time.monotonic() + _BLAME_S
            before, now = now, time.monotonic()
            if now - before > _SUSPENDED_S:
                awake_s = now  # The ranks were suspended too and could send no heartbeats.
            if lost is not None and (lost.is_final or now >= blame_until or not ranks):
                return lost
            if is_asked and deadline is None:
                deadline = now + self._grace_s
            if deadline is not None and now >= deadline:
                return stop_code()
            if ranks:
                # Blames the oldest heartbeat: the other ranks wait for the hung one.
                said_s, rank = min((self.heartbeats[rank].time_s, rank) for rank in ranks)
                silent_s = now - max(said_s, awake_s)
                if silent_s > self._hang_s:
                    killed = exit_code_of(-signal.SIGKILL)
                    return dataclasses.replace(self._failure(rank, killed), hung_s=silent_s)
            time.sleep(_POLL_INTERVAL_S)
        return stop_code() if code == STOPPED else code

    def _failure(self, rank: int, exit_code: int) -> Failure:
        last = self.heartbeats[rank]
        return Failure(
            rank=rank,
            exit_code=exit_code,
            phase=str(last.phase),
            step=last.step if last.num_steps else 0,
            is_final=last.is_final,
        )

    def _fork(self, rank: int, rendezvous: str, unlogged: tuple[Restart, ...]) -> ForkedProcess:
        sys.stdout.flush()
        sys.stderr.flush()
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be_rank(rank, rendezvous, unlogged, parent_pid)
        return ForkedProcess(pid)

    def _be_rank(
        self, rank: int, rendezvous: str, unlogged: tuple[Restart, ...], parent_pid: int
    ) -> NoReturn:
        code: object = 1
        try:
            die_with_parent(parent_pid)
            for each in stop_signals():
                signal.signal(each, signal.SIG_DFL)
            self.heartbeats.become(rank)
            threads = os.environ.get("OMP_NUM_THREADS", threads_per_rank(self._num_ranks))
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self._num_ranks),
                "LOCAL_WORLD_SIZE": str(self._num_ranks),
                "GROUP_RANK": "0",
                "OMP_NUM_THREADS": str(threads),
                RENDEZVOUS_FILE: rendezvous,
            }
            # torch has already read OMP_NUM_THREADS, at import.
            torch.set_num_threads(int(threads))
            code = self._run_rank(unlogged)
        except SystemExit as leaving:
            code = leaving.code
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            # Skips the cleanup handlers inherited from the supervisor.
            os._exit(code if isinstance(code, int) else 1)
