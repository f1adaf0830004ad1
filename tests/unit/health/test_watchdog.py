"""Tests of when a rank ends because a step hangs or a peer is lost, and what it says before."""

import errno
import os
import pathlib
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from paceline.core.processes import LOST_PEER
from paceline.health import hang
from paceline.health.errors import LostRankError
from paceline.health.hang import RankStatus, Watchdog
from paceline.parallel.ranks.heartbeats import Heartbeat, Phase, Writing
from paceline.parallel.ranks.pending import CollectiveError

START_S = 1000.0
TICK_S = 0.25
LOST = CollectiveError("rank 0: all-reduce of 4 MB failed: [pair.cc:534] Connection closed by peer")


class _Ended(BaseException):
    """Takes the place of the end of the process, from which nothing returns."""


class _Machine:
    """The clock of a rank, its heartbeat, and what it does at its end.

    It stands still while the rank runs; only sleep and the ticks of the watchdog advance it.
    """

    def __init__(self) -> None:
        self.now_s = START_S
        self.beats(Phase.FORWARD)
        self.done: list[str] = []
        """What the rank says and does, in order."""

    def beats(self, phase: Phase, *, num_steps: int = 1) -> None:
        """Begins a phase of the step after step 41."""
        self.heartbeat = Heartbeat(
            phase=phase,
            writing=Writing.NOTHING,
            is_final=False,
            step=41,
            num_steps=num_steps,
            time_s=self.now_s,
        )

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.done.append(f"sleep {seconds}")

    def exit(self, code: int) -> None:
        self.done.append(f"exit {code}")
        raise _Ended

    def report(self, step: int, message: str) -> None:
        self.done.append(f"report of step {step}: {message}")


class _BufferedErrors:
    """A stream for errors whose text is lost unless it is flushed."""

    def __init__(self, machine: _Machine) -> None:
        self._machine = machine
        self._text = ""

    def write(self, text: str) -> None:
        self._text += text

    def flush(self) -> None:
        self._machine.done.append(f"stderr: {self._text.strip()}")
        self._text = ""


class _Ticks:
    """Takes the place of the event that ends a watchdog: a tick lasts as long as the test says."""

    def __init__(self, machine: _Machine, seconds: Sequence[float]) -> None:
        self._machine = machine
        self._seconds = list(seconds)

    def wait(self, timeout: float) -> bool:
        assert timeout == TICK_S
        if not self._seconds:
            return True
        self._machine.now_s += self._seconds.pop(0)
        return False


class _Diagnosis:
    """Takes the place of `HangDiagnosis`: other ranks have answered, or are silent."""

    def __init__(self, *others: int) -> None:
        self._others = others
        self.asked: list[tuple[RankStatus, float]] = []

    def statuses(self, own: RankStatus, patience_s: float) -> list[RankStatus | None]:
        self.asked.append((own, patience_s))
        found: list[RankStatus | None] = [None] * 3
        for rank in self._others:
            found[rank] = RankStatus(rank=rank, step=41, phase="data", waited_s=1.0)
        found[own.rank] = own
        return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> _Machine:
    fake = _Machine()
    monkeypatch.setattr(hang, "time", fake)
    monkeypatch.setattr(hang, "own_heartbeat", lambda: fake.heartbeat)
    monkeypatch.setattr(hang, "last_collective", lambda: None)
    monkeypatch.setattr(os, "_exit", fake.exit)
    monkeypatch.setattr(hang, "sys", SimpleNamespace(stderr=_BufferedErrors(fake)))
    return fake


MakeWatchdog = Callable[..., Watchdog]


@pytest.fixture
def make_watchdog(
    machine: _Machine, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> MakeWatchdog:
    def make(
        *,
        rank: int = 0,
        world_size: int = 3,
        timeout_s: float | None = None,
        answering: Sequence[int] = (),
        ticks: Sequence[float] = (),
    ) -> Watchdog:
        diagnosis = _Diagnosis(*answering)
        monkeypatch.setattr(hang, "HangDiagnosis", lambda number: diagnosis)
        watchdog: Any = Watchdog(
            rank=rank,
            world_size=world_size,
            stacks=tmp_path / "stacks",
            report=machine.report,
            timeout_s=timeout_s,
        )
        if ticks:
            watchdog._over = _Ticks(machine, ticks)
        return watchdog

    return make


def _asked(watchdog: Any) -> list[tuple[RankStatus, float]]:
    asked: list[tuple[RankStatus, float]] = watchdog._diagnosis.asked
    return asked


def _stays(watchdog: Watchdog) -> bool:
    """Returns whether the rank still runs when all ticks are over."""
    try:
        watchdog._look()
    except _Ended:
        return False
    return True


@pytest.mark.parametrize(
    "phase", [Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.ALL_REDUCE, Phase.UPDATE]
)
def test_a_step_that_takes_longer_than_its_timeout_ends_the_rank(
    machine: _Machine, make_watchdog: MakeWatchdog, phase: Phase
) -> None:
    machine.beats(phase)
    watchdog = make_watchdog(timeout_s=10.0, ticks=[TICK_S] * 50)
    assert not _stays(watchdog)
    assert machine.now_s == START_S + 10.0 + TICK_S, "at the first tick after the timeout"


@pytest.mark.parametrize(
    "phase", [Phase.START, Phase.LOAD, Phase.EVALUATION, Phase.SAVE, Phase.END]
)
@pytest.mark.parametrize("num_steps", [0, 1])
def test_what_is_no_step_may_take_longer(
    machine: _Machine, make_watchdog: MakeWatchdog, phase: Phase, num_steps: int
) -> None:
    machine.beats(phase, num_steps=num_steps)
    assert _stays(make_watchdog(timeout_s=10.0, ticks=[TICK_S] * 50))


def test_the_first_step_after_a_start_may_take_longer(
    machine: _Machine, make_watchdog: MakeWatchdog
) -> None:
    """It compiles."""
    machine.beats(Phase.FORWARD, num_steps=0)
    assert _stays(make_watchdog(timeout_s=10.0, ticks=[TICK_S] * 50))


def test_without_a_timeout_a_step_may_take_any_time(make_watchdog: MakeWatchdog) -> None:
    assert _stays(make_watchdog(timeout_s=None, ticks=[TICK_S] * 50))


def test_time_for_which_the_process_was_stopped_does_not_count(
    machine: _Machine, make_watchdog: MakeWatchdog
) -> None:
    """A laptop that slept, or a debugger: the step goes on when the process does."""
    ticks = [TICK_S, 3600.0, *[TICK_S] * 50]
    assert not _stays(make_watchdog(timeout_s=10.0, ticks=ticks))
    assert machine.now_s == START_S + TICK_S + 3600.0 + 10.0 + TICK_S


@pytest.mark.parametrize(
    ("ticks", "stopped_s"),
    [
        ([TICK_S] * 9, 0.0),
        ([TICK_S, TICK_S + 1.0, TICK_S], 0.0),
        ([TICK_S, TICK_S + 1.125, TICK_S], 1.125),
        ([TICK_S + 2.0, TICK_S, TICK_S + 4.0], 6.0),
    ],
)
def test_a_stop_is_a_tick_more_than_a_second_late(
    make_watchdog: MakeWatchdog, ticks: list[float], stopped_s: float
) -> None:
    watchdog = make_watchdog(ticks=ticks)
    assert watchdog.take_stopped_s() == 0.0
    watchdog._look()
    assert watchdog.take_stopped_s() == stopped_s
    assert watchdog.take_stopped_s() == 0.0, "each stop is told once"


def test_of_a_hang_one_rank_speaks_before_it_ends(
    machine: _Machine, make_watchdog: MakeWatchdog, tmp_path: pathlib.Path
) -> None:
    watchdog = make_watchdog(rank=0, timeout_s=10.0, answering=[1], ticks=[TICK_S] * 50)
    assert not _stays(watchdog)
    message = (
        "no step within 10 s: rank 2 has not answered within 3 s: stopped, or gone; rank 0 after "
        f"step 41, in forward for 10.2 s; stacks in {tmp_path / 'stacks'}"
    )
    assert machine.done == [
        f"report of step 41: {message}",
        f"stderr: paceline: error: {message}",
        f"exit {LOST_PEER}",
    ]
    ((own, patience_s),) = _asked(watchdog)
    assert patience_s == 3.0
    assert own == RankStatus(rank=0, step=41, phase="forward", waited_s=10.25)


def test_of_a_hang_other_ranks_give_the_first_one_time_to_speak(
    machine: _Machine, make_watchdog: MakeWatchdog
) -> None:
    """A launcher ends all ranks when the first one has ended."""
    watchdog = make_watchdog(rank=1, timeout_s=10.0, answering=[0], ticks=[TICK_S] * 50)
    assert not _stays(watchdog)
    assert machine.done == ["sleep 0.5", f"exit {LOST_PEER}"]


def test_the_lowest_rank_that_answers_speaks(
    machine: _Machine, make_watchdog: MakeWatchdog
) -> None:
    watchdog = make_watchdog(rank=1, timeout_s=10.0, answering=[2], ticks=[TICK_S] * 50)
    assert not _stays(watchdog)
    assert machine.done[0].startswith("report of step 41: no step within 10 s: rank 0 has not")
    assert machine.done[-1] == f"exit {LOST_PEER}"


@pytest.mark.parametrize("rank", [0, 2])
def test_a_hanging_rank_leaves_its_stacks(
    make_watchdog: MakeWatchdog, tmp_path: pathlib.Path, rank: int
) -> None:
    assert not _stays(make_watchdog(rank=rank, timeout_s=10.0, answering=[1], ticks=[TICK_S] * 50))
    stacks = (tmp_path / "stacks" / f"rank-{rank}.txt").read_text()
    assert "test_a_hanging_rank_leaves_its_stacks" in stacks


def _fill_disk(machine: _Machine, stacks: pathlib.Path) -> None:
    """Makes a rank unable to write its stacks or an event."""

    def fail(step: int, message: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    machine.report = fail  # type: ignore[method-assign]
    stacks.write_text("a file where the directory should be")


def test_a_full_disk_hides_nobody_who_hangs(
    machine: _Machine, make_watchdog: MakeWatchdog, tmp_path: pathlib.Path
) -> None:
    _fill_disk(machine, tmp_path / "stacks")
    watchdog = make_watchdog(timeout_s=10.0, answering=[1], ticks=[TICK_S] * 50)
    assert not _stays(watchdog)
    said, ended = machine.done
    assert said.startswith("stderr: paceline: error: no step within 10 s: rank 2 has not answered")
    assert said.endswith(f"; no stacks in {tmp_path / 'stacks'}: File exists")
    assert ended == f"exit {LOST_PEER}"
    assert len(_asked(watchdog)) == 1, "else the other ranks would call this one silent"


def test_a_full_disk_hides_nobody_who_is_lost(
    machine: _Machine, make_watchdog: MakeWatchdog, tmp_path: pathlib.Path
) -> None:
    _fill_disk(machine, tmp_path / "stacks")
    with (
        pytest.raises(LostRankError, match="rank 2 has not answered"),
        make_watchdog(answering=[1]),
    ):
        raise LOST


def test_whatever_fails_on_the_way_a_hanging_rank_ends(
    machine: _Machine, make_watchdog: MakeWatchdog
) -> None:
    def fail(step: int, message: str) -> None:
        raise ValueError("a report that cannot be made")

    machine.report = fail  # type: ignore[method-assign]
    assert not _stays(make_watchdog(timeout_s=10.0, ticks=[TICK_S] * 50))
    assert machine.done == [f"exit {LOST_PEER}"]


def test_of_a_failed_collective_the_first_rank_raises_who_is_lost(
    machine: _Machine, make_watchdog: MakeWatchdog, tmp_path: pathlib.Path
) -> None:
    watchdog = make_watchdog(rank=0, answering=[1])
    machine.now_s += 7.0
    with pytest.raises(LostRankError) as caught, watchdog:
        raise LOST
    message = (
        "a collective has failed (Connection closed by peer): rank 2 has not answered within "
        "1.5 s: stopped, or gone; rank 0 after step 41, in forward for 7 s; stacks in "
        f"{tmp_path / 'stacks'}"
    )
    assert str(caught.value) == message
    assert caught.value.__cause__ is LOST
    assert machine.done == [f"report of step 41: {message}"]
    ((_, patience_s),) = _asked(watchdog)
    assert patience_s == 1.5, "others notice a failed collective at once"


@pytest.mark.parametrize("world_size", [2, 3])
def test_of_a_failed_collective_other_ranks_end_without_a_word(
    machine: _Machine, make_watchdog: MakeWatchdog, world_size: int
) -> None:
    """A restart may help them as well."""
    with (
        pytest.raises(SystemExit) as caught,
        make_watchdog(rank=1, world_size=world_size, answering=[0]),
    ):
        raise LOST
    assert caught.value.code == LOST_PEER
    assert caught.value.__cause__ is LOST
    assert machine.done == ["sleep 0.5"]


@pytest.mark.parametrize(
    ("error", "world_size"), [(LOST, 1), (ValueError("a shape"), 3), (KeyboardInterrupt(), 3)]
)
def test_errors_of_this_rank_pass_as_they_are(
    machine: _Machine, make_watchdog: MakeWatchdog, error: BaseException, world_size: int
) -> None:
    """A rank by itself has no peer to lose."""
    watchdog = make_watchdog(world_size=world_size)
    with pytest.raises(type(error)) as caught, watchdog:
        raise error
    assert caught.value is error
    assert machine.done == []
    assert _asked(watchdog) == []


def test_a_run_without_an_error_ends_without_questions(
    machine: _Machine, make_watchdog: MakeWatchdog
) -> None:
    watchdog = make_watchdog()
    with watchdog:
        pass
    assert machine.done == []
    assert _asked(watchdog) == []


class _Thread:
    """Takes the place of a watchdog's thread, and tells what is asked of it."""

    def __init__(self, over: threading.Event) -> None:
        self._over = over
        self.calls: list[tuple[str, bool]] = []

    def start(self) -> None:
        self.calls.append(("start", self._over.is_set()))

    def join(self) -> None:
        self.calls.append(("join", self._over.is_set()))


def test_nothing_is_watched_after_the_steps(make_watchdog: MakeWatchdog) -> None:
    """The store is gone then; so the thread is told to end, and waited for."""
    watchdog: Any = make_watchdog()
    thread = watchdog._thread = _Thread(watchdog._over)
    with watchdog:
        assert thread.calls == [("start", False)]
    assert thread.calls[1:] == [("join", True)]


def test_a_watchdog_watches_beside_the_steps_and_keeps_no_program_alive(
    make_watchdog: MakeWatchdog,
) -> None:
    def watching() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "watchdog"]

    before = watching()
    with make_watchdog():
        (thread,) = [thread for thread in watching() if thread not in before]
        assert thread.daemon
    assert not thread.is_alive()


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            f"{GLOO} [10.0.0.7]:4130. This may indicate a remote failure",
            "Connection closed by peer",
        ),
        (f"{NCCL}\nLast error:\n[ncclx] Broken pipe", NCCL),
        ("rank 1: all-reduce of 4 MB failed: [pair.cc:534] Timed out", "Timed out"),
    ],
)
def test_a_reason_is_without_source_locations_and_advice(
    make_watchdog: MakeWatchdog, text: str, reason: str
) -> None:
    with pytest.raises(LostRankError) as caught, make_watchdog(answering=[1, 2]):
        raise dist.DistBackendError(text)
    assert str(caught.value).startswith(f"a collective has failed ({reason}")
    assert "may indicate" not in str(caught.value)
    assert "Last error" not in str(caught.value)
