"""Tests of who is at fault for a hang: ranks that do not answer, else ranks that are behind."""

import queue
import threading
from collections.abc import Iterable
from typing import Self

import msgspec
import pytest
import torch.distributed as dist

from paceline.health import hang
from paceline.health.hang import (
    HangDiagnosis,
    LastCollective,
    RankStatus,
    diagnose_hang,
    is_lost_peer,
)
from paceline.parallel.ranks.pending import CollectiveError

PATIENCE_S = 60.0
"""More than a test ever waits for answers that are there."""
_MOST_LOOKS = 50


def status(
    rank: int, step: int, phase: str = "the step", number: int | None = 7, waited_s: float = 4.0
) -> RankStatus:
    collective = None
    if number is not None:
        collective = LastCollective(number=number, text="all_reduce of 12 elements (Float)")
    return RankStatus(rank=rank, step=step, phase=phase, waited_s=waited_s, collective=collective)


def test_who_is_silent_is_named_with_what_the_others_wait_for() -> None:
    said = diagnose_hang([status(0, 5), None, status(2, 5)], 3.0)
    assert said.startswith(
        "rank 1 has not answered within 3 s: stopped, or gone; rank 0 after step 5"
    )
    assert "all_reduce of 12 elements" in said
    assert diagnose_hang([status(0, 5), None, None], 3.0).startswith("ranks 1, 2 have not answered")


def test_who_is_behind_is_named() -> None:
    said = diagnose_hang([status(0, 5, number=9), status(1, 5, "data", 7)], 3.0)
    assert said.startswith("rank 1 after step 5, in data for 4 s")
    assert "others wait for it: rank 0" in said


def test_all_that_are_behind_are_named() -> None:
    said = diagnose_hang([status(0, 4), status(1, 5), status(2, 4, number=6)], 3.0)
    assert said == (
        "rank 0 after step 4, in the step for 4 s, last all_reduce of 12 elements (Float); "
        "rank 2 after step 4, in the step for 4 s, last all_reduce of 12 elements (Float); "
        "others wait for it: rank 1 after step 5, in the step for 4 s, "
        "last all_reduce of 12 elements (Float)"
    )


def test_a_step_counts_more_than_collectives() -> None:
    said = diagnose_hang([status(0, 5, number=3), status(1, 4, number=9)], 3.0)
    assert said.startswith("rank 1 after step 4")


def test_a_rank_without_any_collective_is_behind_one_with_its_first() -> None:
    said = diagnose_hang([status(0, 0, number=1), status(1, 0, "load", None)], 3.0)
    assert said.startswith("rank 1 after step 0, in load for 4 s; others wait for it: rank 0")


def test_nobody_is_blamed_where_all_are_in_one_place() -> None:
    assert "suspect the link" in diagnose_hang([status(0, 5), status(1, 5)], 3.0)


class _Clock:
    """Takes the place of the module `time`: only sleep advances it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class _Store:
    """A store that others share, with the answers of some ranks.

    Like a connection that is in use by a rank that hangs, it must not be used itself if it can be
    cloned.
    """

    def __init__(
        self, answers: Iterable[RankStatus] = (), *, prefix: str = "", may_clone: bool = True
    ) -> None:
        self.content = {f"{prefix}/{each.rank}": msgspec.json.encode(each) for each in answers}
        self.looks: list[str] = []
        self.is_usable = not may_clone
        self.threads: list[threading.Thread] = []
        if may_clone:
            self.clone = self._clone

    def _clone(self) -> Self:
        self.is_usable = True
        return self

    def set(self, key: str, value: bytes) -> None:
        assert self.is_usable
        self.threads.append(threading.current_thread())
        self.content[key] = value

    def check(self, keys: list[str]) -> bool:
        assert self.is_usable
        self.looks += keys
        assert len(self.looks) < _MOST_LOOKS, "looks for ever"
        return all(key in self.content for key in keys)

    def get(self, key: str) -> bytes:
        return self.content[key]

    def join(self) -> None:
        """Waits until nobody uses it any more."""
        for thread in self.threads:
            thread.join()


class _LostStore:
    def set(self, key: str, value: bytes) -> None:
        raise dist.DistNetworkError("Broken pipe")


@pytest.fixture(autouse=True)
def _first_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    fake = _Clock()
    monkeypatch.setattr(hang, "time", fake)
    return fake


def _diagnosis(
    monkeypatch: pytest.MonkeyPatch, store: object, number: int = 3, world_size: int = 3
) -> HangDiagnosis:
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    return HangDiagnosis(number)


PREFIX = "paceline/watch/0/3"


@pytest.mark.usefixtures("clock")
def test_ranks_find_the_answers_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one has all; the first ones would have waited for it."""
    store = dist.HashStore()
    for rank in (0, 1):
        own = status(rank, 5)
        found = _diagnosis(monkeypatch, store).statuses(own, 0.0)
        assert found[rank] == own
        assert found.count(None) == 2
    expected = [status(rank, 5) for rank in range(3)]
    assert _diagnosis(monkeypatch, store).statuses(expected[2], PATIENCE_S) == expected
    assert _diagnosis(monkeypatch, store).statuses(expected[0], PATIENCE_S) == expected


@pytest.mark.parametrize("may_clone", [True, False])
@pytest.mark.usefixtures("clock")
def test_a_store_that_can_be_cloned_is_not_used_itself(
    monkeypatch: pytest.MonkeyPatch, may_clone: bool
) -> None:
    store = _Store([status(0, 4), status(2, 4)], prefix=PREFIX, may_clone=may_clone)
    expected = [status(0, 4), status(1, 5), status(2, 4)]
    assert _diagnosis(monkeypatch, store).statuses(status(1, 5), PATIENCE_S) == expected
    assert store.looks == [f"{PREFIX}/0", f"{PREFIX}/2"], "each once, and not after its own answer"


@pytest.mark.usefixtures("clock")
def test_a_silent_rank_keeps_nobody_from_the_answers_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = _Store([status(2, 4)], prefix=PREFIX)
    found = _diagnosis(monkeypatch, store).statuses(status(0, 5), 0.25)
    assert found == [status(0, 5), None, status(2, 4)]


def test_answers_are_looked_for_until_patience_ends(
    monkeypatch: pytest.MonkeyPatch, clock: _Clock
) -> None:
    store = _Store()
    began_s = clock.now_s
    _diagnosis(monkeypatch, store, world_size=2).statuses(status(0, 5), 0.35)
    store.join()
    assert store.looks == [f"{PREFIX}/1"] * 4  # Ten times a second.
    assert clock.now_s == pytest.approx(began_s + 0.4)


@pytest.mark.usefixtures("clock")
def test_without_patience_a_rank_only_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    store = _Store([status(1, 5)], prefix=PREFIX)
    found = _diagnosis(monkeypatch, store, world_size=2).statuses(status(0, 5), 0.0)
    store.join()
    assert found == [status(0, 5), None]
    assert store.looks == []
    assert msgspec.json.decode(store.content[f"{PREFIX}/0"], type=RankStatus) == status(0, 5)


def test_a_lost_store_leaves_a_rank_with_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _diagnosis(monkeypatch, _LostStore()).statuses(status(1, 5), PATIENCE_S)
    assert found == [None, status(1, 5), None]


def test_an_answer_that_cannot_be_read_is_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    store = _Store()
    store.content[f"{PREFIX}/1"] = b"{"
    found = _diagnosis(monkeypatch, store).statuses(status(0, 5), PATIENCE_S)
    assert found == [status(0, 5), None, None]


class _StuckStore:
    """A store whose host is stopped: it answers only after `release`."""

    def __init__(self) -> None:
        self.threads: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
        self.release = threading.Event()

    def set(self, key: str, value: bytes) -> None:
        self.threads.put(threading.current_thread())
        assert self.release.wait(PATIENCE_S)

    def check(self, keys: list[str]) -> bool:
        return False


@pytest.mark.usefixtures("clock")
def test_no_rank_has_to_wait_for_a_stuck_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the program, at its end."""
    store = _StuckStore()
    waits_s: list[float] = []
    diagnosis = _diagnosis(monkeypatch, store, world_size=2)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", lambda _, timeout: waits_s.append(timeout))
        found = diagnosis.statuses(status(0, 5), 0.25)
    assert found == [status(0, 5), None]
    assert waits_s == [1.25], "a second more than a store needs that answers"
    asking = store.threads.get(timeout=PATIENCE_S)
    is_daemon = asking.daemon
    store.release.set()
    asking.join()
    assert is_daemon


@pytest.mark.usefixtures("clock")
def test_runs_and_attempts_have_answers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may train several times, and a restarted run may have the store of the last."""
    store = dist.HashStore()

    def found(number: int, own: RankStatus) -> list[RankStatus | None]:
        return _diagnosis(monkeypatch, store, number, world_size=2).statuses(own, 0.05)

    assert found(1, status(0, 5)) == [status(0, 5), None]
    assert found(2, status(1, 6)) == [None, status(1, 6)]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert found(1, status(1, 7)) == [None, status(1, 7)]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert found(1, status(1, 8)) == [status(0, 5), status(1, 8)]


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (CollectiveError("rank 0: all-reduce of 4 MB failed: Timed out"), True),
        (dist.DistBackendError("timeout"), True),
        (dist.DistNetworkError("Broken pipe"), True),
        (RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed"), True),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:3690"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("no such file: gloo/NCCL"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_errors_of_collectives_mean_that_a_peer_is_lost(
    error: BaseException, is_lost: bool
) -> None:
    assert is_lost_peer(error) == is_lost
