"""Watches this rank from a separate thread, and identifies the rank at fault when a step hangs.

1. A step exceeds its timeout, or a collective fails. Every rank that notices writes its stacks and
   publishes its status in the store of the process group, which a healthy run does not access.
2. The lowest rank that did so reports which ranks are silent or behind: one message, one event.
3. The ranks exit, with a code that says that a restart may help.

The store may be lost or stopped together with the first rank. A daemon thread therefore accesses
it, so that no rank has to wait for the store. The watching thread also detects that its process was
stopped, by a gap between two of its own ticks.
"""

import contextlib
import faulthandler
import itertools
import json
import math
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import msgspec
import torch
import torch.distributed as dist

from paceline.core.units import format_decimal, format_seconds
from paceline.health.errors import LostRankError
from paceline.parallel.ranks.heartbeats import Phase, own_heartbeat
from paceline.parallel.ranks.pending import CollectiveError

_POLL_S = 0.1
_TICK_S = 0.25
_PATIENCE_S = 3.0
"""How long a hanging rank waits for answers from the others, which hang as well."""
_FAILED_PATIENCE_S = 1.5
"""The same after a failed collective, which others notice at once; it delays the restart."""
_FIRST_SPEAKS_S = 0.5
"""How long other ranks wait before they exit, so that the report is not cut off."""
_STOPPED_S = 1.0
"""Delay of a tick above which the process counts as stopped."""
_STEP_PHASES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.ALL_REDUCE, Phase.UPDATE)
_numbers = itertools.count()


class Watchdog:
    """Watches the main thread while it is open; every rank must open one.

    The stacks of hanging ranks go to the directory `stacks`. `report` is called on one rank with
    its step and the message about the ranks at fault. After `timeout_s` a hanging step ends the
    process.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        stacks: pathlib.Path,
        report: Callable[[int, str], None],
        timeout_s: float | None = None,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._stacks = stacks
        self._report = report
        self._timeout_s = timeout_s
        self._resumed_s = 0.0
        """When this process last resumed after being stopped; waiting counts from then on."""
        self._diagnosis = HangDiagnosis(next(_numbers))
        self._over = threading.Event()
        self._stopped_s = 0.0
        self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._over.set()
        self._thread.join()
        if error is not None and self._world_size > 1 and is_lost_peer(error):
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
        """Returns the message, and whether this rank is the one that reports it."""
        heartbeat = own_heartbeat()
        own = RankStatus(
            rank=self._rank,
            step=heartbeat.step,
            phase=str(heartbeat.phase),
            waited_s=self._waited_s(),
            collective=last_collective(),
        )
        evidence = f"stacks in {self._stacks}"
        try:
            dump_stacks(self._stacks, self._rank)
        except OSError as error:  # A full disk must hide neither this rank nor who is at fault.
            evidence = f"no stacks in {self._stacks}: {error.strerror}"
        statuses = self._diagnosis.statuses(own, patience_s)
        is_first = self._rank == min(each.rank for each in statuses if each is not None)
        message = f"{what}: {diagnose_hang(statuses, patience_s)}; {evidence}"
        if is_first:
            with contextlib.suppress(OSError):  # The caller tells the message as well.
                self._report(heartbeat.step, message)
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


class LastCollective(msgspec.Struct, frozen=True, kw_only=True):
    """The newest entry of torch's flight recorder."""

    number: int
    """Number of collectives that this rank has started in its group, including this one."""
    text: str
    """Operation and size."""


def dump_stacks(directory: pathlib.Path, rank: int) -> pathlib.Path:
    """Writes the Python stack of every thread, and torch's flight recorder if available.

    Works even while the main thread is blocked in C.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"rank-{rank}.txt"
    with path.open("w", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    if (recorded := _flight_recorder()) is not None:
        (directory / f"rank-{rank}.flight.json").write_text(json.dumps(recorded), encoding="utf-8")
    return path


def last_collective() -> LastCollective | None:
    """Returns the last collective that this rank started; None if torch recorded none."""
    entries = (_flight_recorder() or {}).get("entries", [])
    for entry in reversed(entries):
        if entry.get("is_p2p"):
            continue
        name = str(entry.get("profiling_name", "collective")).partition(":")[2] or "collective"
        num_elements = sum(math.prod(sizes) for sizes in entry.get("input_sizes", []))
        kind = (entry.get("input_dtypes") or ["?"])[0]
        return LastCollective(
            number=int(entry.get("collective_seq_id", 0)),
            text=f"{name} of {format_decimal(num_elements, 'elements')} ({kind})",
        )
    return None


def _flight_recorder() -> dict[str, Any] | None:
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return None
    try:
        recorded: dict[str, Any] = json.loads(dump())
    except (RuntimeError, ValueError):
        return None
    return recorded


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a rank, as reported by the rank."""

    rank: int
    step: int
    """Number of completed steps."""
    phase: str
    waited_s: float
    """Time spent in this phase so far."""
    collective: LastCollective | None = None

    def __str__(self) -> str:
        where = f"rank {self.rank} after step {self.step}, in {self.phase} for "
        where += format_seconds(self.waited_s)
        return where if self.collective is None else f"{where}, last {self.collective.text}"


class HangDiagnosis:
    """Collects the positions of all ranks, in the run of this `number` within the process."""

    def __init__(self, number: int) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"paceline/watch/{attempt}/{number}"
        self._store: Any = dist.distributed_c10d._get_default_store()

    def statuses(self, own: RankStatus, patience_s: float) -> list[RankStatus | None]:
        """Publishes this rank's position; returns those of all ranks, None for silent ones.

        Other ranks have `patience_s` to notice the problem and answer.
        """
        found: list[RankStatus | None] = [None] * dist.get_world_size()
        found[own.rank] = own
        asking = threading.Thread(target=self._ask, args=(own, found, patience_s), daemon=True)
        asking.start()
        asking.join(patience_s + 1.0)
        return list(found)

    def _ask(self, own: RankStatus, found: list[RankStatus | None], patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        try:
            store = self._store.clone() if hasattr(self._store, "clone") else self._store
            store.set(f"{self._prefix}/{own.rank}", msgspec.json.encode(own))
            while None in found and time.monotonic() < deadline:
                for rank, answer in enumerate(found):
                    key = f"{self._prefix}/{rank}"
                    if answer is None and store.check([key]):
                        found[rank] = msgspec.json.decode(store.get(key), type=RankStatus)
                time.sleep(_POLL_S)
        except (RuntimeError, msgspec.DecodeError):
            return  # The store is gone: use the answers received so far.


def diagnose_hang(answers: Sequence[RankStatus | None], patience_s: float) -> str:
    """Returns a description of the ranks that the others wait for; None in `answers` is silence."""
    present = [answer for answer in answers if answer is not None]
    silent = [str(rank) for rank, answer in enumerate(answers) if answer is None]
    if silent:
        ranks = f"rank{'s' * (len(silent) > 1)} {', '.join(silent)}"
        verb = "have" if len(silent) > 1 else "has"
        waiting = f"; {present[0]}" if present else ""
        return (
            f"{ranks} {verb} not answered within {format_seconds(patience_s)}: stopped, or gone"
            f"{waiting}"
        )
    behind = [each for each in present if _progress(each) < max(map(_progress, present))]
    if behind:
        ahead = max(present, key=_progress)
        return f"{'; '.join(map(str, behind))}; others wait for it: {ahead}"
    return f"all ranks answer and are at the same point ({present[0]}): suspect the link"


def _progress(status: RankStatus) -> tuple[int, int]:
    return status.step, 0 if status.collective is None else status.collective.number
