"""Launches replicas on this host, and the lighthouse through which they find each other.

The launching process does not train. It restarts a replica that fails, and the replica heals from
one that is still running.
"""

import contextlib
import math
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError
from paceline.core.host import threads_per_rank
from paceline.core.processes import (
    STOP_CODES,
    SignalForwarder,
    back_off_s,
    end_processes,
    exit_code_of,
    start_child,
)
from paceline.training.config import RunConfig

if TYPE_CHECKING:
    from torchft.coordination import LighthouseServer

REPLICA = "PACELINE_REPLICA"
"""Environment variable with the number of a process's replica."""
NUM_REPLICAS = "PACELINE_REPLICAS"
LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"

_POLL_S = 0.05
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_MOST_FAILURES = 5
"""Consecutive failures of a replica, without a step between them, before it is given up."""
_STEPPED = "PACELINE_REPLICA_STEPPED"
"""Environment variable with the file descriptor on which a replica reports its first step."""


def require_torchft() -> None:
    """Raises unless torchft is installed."""
    # Its servers would log every step, which is of no use; replicas inherit the setting.
    os.environ.setdefault("RUST_LOG", "error")
    try:
        import torchft  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "parallel.elastic replicas needs torchft; `pip install 'paceline[elastic]'`"
        ) from error


def run_replicas(config: RunConfig, num_replicas: int, grace_s: float) -> int:
    """Starts a copy of this script per replica, and restarts those that end early."""
    require_torchft()
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=int(config.parallel.replica_timeout_s * 1000),
        quorum_tick_ms=100,
        heartbeat_timeout_ms=int(config.parallel.heartbeat_timeout_s * 1000),
    )
    try:
        return _Replicas(num_replicas, loopback_address(lighthouse), grace_s).run()
    finally:
        lighthouse.shutdown()


def loopback_address(lighthouse: "LighthouseServer") -> str:
    """Returns the loopback address of a lighthouse, which itself reports its host name."""
    return f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2].rstrip('/')}"


def note_first_step() -> None:
    """Tells the launcher that this replica trains, which resets its failure count."""
    descriptor = os.environ.pop(_STEPPED, None)
    if descriptor is not None:
        os.write(int(descriptor), b"1")
        os.close(int(descriptor))


class _Replica:
    """One replica, run by one process after another."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.next_start_s = 0.0
        self.num_failures = 0
        self._stepped = -1
        """The launcher's end of the pipe, which contains a byte after the first step."""

    def start(self, environment: dict[str, str]) -> None:
        """Starts a copy of this script."""
        self._stepped, write_end = os.pipe()
        os.set_blocking(self._stepped, False)
        self.process = start_child(
            [sys.executable, *sys.orig_argv[1:]],
            env={**environment, _STEPPED: str(write_end)},
            pass_fds=(write_end,),
        )
        os.close(write_end)

    def note_end(self) -> None:
        """Clears the process, and resets the failure count if the process completed a step."""
        self.process = None
        # A leftover child process may keep the other end open, and reading would block.
        with contextlib.suppress(BlockingIOError):
            if os.read(self._stepped, 1):
                self.num_failures = 0
        os.close(self._stepped)


class _Replicas:
    def __init__(self, number: int, lighthouse: str, grace_s: float) -> None:
        self._environment = {
            **os.environ,
            LIGHTHOUSE: lighthouse,
            NUM_REPLICAS: str(number),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads_per_rank(number))),
        }
        self._replicas = [_Replica() for _ in range(number)]
        self._grace_s = grace_s
        self._is_ending = False

    def run(self) -> int:
        """Keeps the replicas running until the run finishes or is asked to stop."""
        exit_code, stop_by_s = 1, math.inf
        try:
            with SignalForwarder() as requests:
                for number in range(len(self._replicas)):
                    self._start(number)
                while any(each.process or each.next_start_s for each in self._replicas):
                    if requests.send_to(self._running()):
                        self._end_with_these()
                        stop_by_s = min(stop_by_s, time.monotonic() + self._grace_s)
                    for number, replica in enumerate(self._replicas):
                        code = self._look_after(number, replica)
                        exit_code = exit_code if code is None else code
                    if time.monotonic() > stop_by_s:
                        break
                    time.sleep(_POLL_S)
                return exit_code
        finally:
            end_processes(self._running())

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [each.process for each in self._replicas if each.process is not None]

    def _end_with_these(self) -> None:
        """Disables restarts."""
        self._is_ending = True
        for replica in self._replicas:
            replica.next_start_s = 0.0

    def _look_after(self, number: int, replica: _Replica) -> int | None:
        """Restarts a failed replica; returns the exit code of one that is done or given up."""
        now = time.monotonic()
        if replica.process is None:
            if replica.next_start_s and now >= replica.next_start_s:
                replica.next_start_s = 0.0
                self._start(number)
            return None
        return_code = replica.process.poll()
        if return_code is None:
            return None
        code = exit_code_of(return_code)
        replica.note_end()
        if code in (0, *STOP_CODES) or self._is_ending:
            # The run is over: no replica is left to heal from.
            self._is_ending = True
            return code if code in (0, *STOP_CODES) else None
        replica.num_failures += 1
        if replica.num_failures >= _MOST_FAILURES:
            _say(
                f"replica {number} failed {_MOST_FAILURES} times in a row, and is not restarted "
                "again"
            )
            return code
        _say(f"replica {number} ended with exit code {code} and is restarted")
        replica.next_start_s = now + back_off_s(
            replica.num_failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S
        )
        return None

    def _start(self, number: int) -> None:
        self._replicas[number].start({**self._environment, REPLICA: str(number)})


def _say(text: str) -> None:
    sys.stderr.write(f"paceline: {text}\n")
