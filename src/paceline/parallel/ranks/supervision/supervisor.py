"""Ranks of one host, forked from a process that has torch imported, and forked again.

A rank that dies breaks the group of all. What costs time in starting again is not the process but
the import of torch, so this process, which runs nothing itself, keeps it imported: forking takes
milliseconds, and new processes have no aborted groups, no half-finished messages and no memory of a
failed attempt. Survivors are killed, whatever they are doing: checkpoints stand that.

Until all ranks have ended well:

1. Fork the ranks; they meet in a file of their attempt.
2. Wait for one that fails, hangs, or was asked to stop. Signals are passed on.
3. Kill the others. Start again, or say why not.

Ranks die with this process, even if it is killed.
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

from paceline.core.processes import (
    STOP_SIGNALS,
    STOPPED,
    ForkedProcess,
    PassedOn,
    die_with_parent,
    exit_code_of,
)
from paceline.parallel.ranks.rendezvous import RENDEZVOUS_FILE, rendezvous_path
from paceline.parallel.ranks.supervision.heartbeats import Heartbeats
from paceline.parallel.ranks.supervision.policy import Failure, RestartPolicy
from paceline.records.environment import threads_per_rank

_POLL_INTERVAL_S = 0.005
_EXCEPTION = 1
"""Exit code of a rank that has lost a peer, among others: who ended otherwise is to blame."""
_BLAME_S = 1.0
_SUSPENDED_S = 5.0
"""A pause of this process itself after which it was stopped, by Ctrl-Z for example."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restart:
    """One restart that the metrics of the run do not tell of yet."""

    number: int
    failure: Failure
    silent_s: float
    """From the failed rank's last sign of life to when its end was noticed."""
    noticed_s: float
    """When that was, on the clock that all processes of a host share."""
    started_s: float
    """When new ranks were started."""


def supervise(
    run_rank: Callable[[tuple[Restart, ...]], int],
    *,
    num_ranks: int,
    max_restarts: int,
    hang_s: float,
    grace_s: float,
) -> int:
    """Runs ranks until they have ended well, and returns the exit code of all.

    Args:
        run_rank: Is called in each rank's process, whose variables say which it is, with the
            restarts that were not told of yet; returns the exit code.
        num_ranks: How many.
        max_restarts: How often they are started again, at most.
        hang_s: How long a rank may give no sign of life.
        grace_s: How long ranks may take to end when they are asked to.
    """
    supervisor = _Supervisor(run_rank, num_ranks, hang_s, grace_s)
    policy = RestartPolicy(max_restarts)
    untold: tuple[Restart, ...] = ()
    number = 0
    gc.freeze()  # What is there stays: collecting it in a rank would copy shared pages.
    with PassedOn() as requests:
        while True:
            ending = supervisor.run_attempt(untold, requests)
            if isinstance(ending, int):
                return ending
            noticed_s = time.monotonic()
            verdict = policy.judge(ending)
            sys.stderr.write(f"paceline: {ending}; {verdict.why}\n")
            if not verdict.restart:
                return ending.exit_code
            if requests.come_within(verdict.pause_s):
                return STOPPED
            if supervisor.heartbeats[0].num_steps:
                untold = ()
            number += 1
            restart = Restart(
                number=number,
                failure=ending,
                silent_s=noticed_s - supervisor.heartbeats[ending.rank].time_s,
                noticed_s=noticed_s,
                started_s=time.monotonic(),
            )
            untold = (*untold, restart)


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

    def run_attempt(self, untold: tuple[Restart, ...], requests: PassedOn) -> Failure | int:
        """Returns how ranks have failed, or the exit code of those that have not."""
        self.heartbeats.reset()
        ranks: dict[int, ForkedProcess] = {}
        with rendezvous_path() as path:
            try:
                for rank in range(self._num_ranks):
                    ranks[rank] = self._fork(rank, path, untold)
                return self._wait(ranks, requests)
            finally:
                for process in ranks.values():
                    process.kill()

    def _wait(self, ranks: dict[int, ForkedProcess], requests: PassedOn) -> Failure | int:
        code, deadline = 0, None
        lost: Failure | None = None
        blame_until = 0.0
        now = awake_s = time.monotonic()
        while ranks:
            is_asked = requests.send_to(ranks.values())
            for rank, process in list(ranks.items()):
                return_code = process.poll()
                if return_code is None:
                    continue
                del ranks[rank]
                if return_code == STOPPED or (deadline and return_code == -signal.SIGTERM):
                    is_asked, code = True, STOPPED
                elif return_code not in (0, _EXCEPTION):
                    return self._failure(rank, exit_code_of(return_code))
                elif return_code == _EXCEPTION and code != STOPPED and lost is None:
                    lost = self._failure(rank, return_code)
                    blame_until = time.monotonic() + _BLAME_S
            before, now = now, time.monotonic()
            if now - before > _SUSPENDED_S:
                awake_s = now  # Nobody can have said anything meanwhile.
            if lost is not None and (lost.is_final or now >= blame_until or not ranks):
                return lost
            if is_asked and deadline is None:
                deadline = now + self._grace_s
            if deadline is not None and now >= deadline:
                return STOPPED
            if ranks:
                # The others wait for it, and have said something since.
                said_s, rank = min((self.heartbeats[rank].time_s, rank) for rank in ranks)
                silent_s = now - max(said_s, awake_s)
                if silent_s > self._hang_s:
                    killed = exit_code_of(-signal.SIGKILL)
                    return dataclasses.replace(self._failure(rank, killed), hung_s=silent_s)
            time.sleep(_POLL_INTERVAL_S)
        return code

    def _failure(self, rank: int, exit_code: int) -> Failure:
        last = self.heartbeats[rank]
        return Failure(
            rank=rank,
            exit_code=exit_code,
            phase=str(last.phase),
            step=last.step if last.num_steps else 0,
            is_final=last.is_final,
        )

    def _fork(self, rank: int, rendezvous: str, untold: tuple[Restart, ...]) -> ForkedProcess:
        sys.stdout.flush()
        sys.stderr.flush()
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be_rank(rank, rendezvous, untold, parent_pid)
        return ForkedProcess(pid)

    def _be_rank(
        self, rank: int, rendezvous: str, untold: tuple[Restart, ...], parent_pid: int
    ) -> NoReturn:
        code: object = 1
        try:
            die_with_parent(parent_pid)
            for each in STOP_SIGNALS:
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
            # The variable was read when torch was imported.
            torch.set_num_threads(int(threads))
            code = self._run_rank(untold)
        except SystemExit as leaving:
            code = leaving.code
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            # Nothing of the supervisor's is to be cleaned up here.
            os._exit(code if isinstance(code, int) else 1)
