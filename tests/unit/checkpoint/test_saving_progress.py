"""Tests of what a checkpointer does and says during a save: order, failures, waiting, memory."""

import gc
import pathlib
import threading
import types
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.storage import DirectoryStorage
from paceline.parallel.ranks.heartbeats import Writing, beat_writing, own_heartbeat
from paceline.parallel.zero.optimizer_checkpoint import FlatPiece
from tests.unit.checkpoint.ranks import checkpoint_ranks

_PATIENCE_S = 60.0


class Noting(DirectoryStorage):
    """A directory that notes its calls, and what the rank's heartbeat says during each."""

    def __init__(self, directory: pathlib.Path) -> None:
        super().__init__(directory)
        self.calls: list[str] = []
        self.writing: dict[str, Writing] = {}

    def _note(self, name: str) -> None:
        self.calls.append(name)
        self.writing[name] = own_heartbeat().writing

    def begin(self, step: int, save_id: str) -> None:
        self._note("begin")
        super().begin(step, save_id)

    def write(self, step: int, save_id: str, name: str, parts: Iterable[bytes | memoryview]) -> str:
        self._note("write")
        return super().write(step, save_id, name, parts)

    def publish(self, step: int, save_id: str, manifest: bytes) -> None:
        self._note("publish")
        super().publish(step, save_id, manifest)

    def abandon(self, step: int, save_id: str) -> None:
        self._note("abandon")
        super().abandon(step, save_id)

    def release(self, step: int, save_id: str) -> None:
        self._note("release")
        super().release(step, save_id)

    def remove(self, step: int) -> None:
        self._note("remove")
        super().remove(step)

    def sweep(self) -> list[str]:
        self._note("sweep")
        return super().sweep()


def _state(value: float = 1.0) -> dict[str, Any]:
    return {"x": torch.full((4,), value)}


_BAD: dict[str, Any] = {"x": torch.ones(4), "bad": {1}}
"""Fails when its values are written."""


class Unwritable(Noting):
    """A directory in which no file can be written while `is_broken`."""

    is_broken = True

    def write(self, step: int, save_id: str, name: str, parts: Iterable[bytes | memoryview]) -> str:
        if self.is_broken:
            self._note("write")
            raise CheckpointError("no room")
        return super().write(step, save_id, name, parts)


def test_a_save_is_published_then_released_and_only_then_are_others_removed(
    tmp_path: pathlib.Path,
) -> None:
    place = Noting(tmp_path)
    with Checkpointer(place, keep=1, asynchronous=False) as checkpointer:
        assert place.calls == ["sweep"]
        checkpointer.save(1, _state(), None)
        place.calls.clear()
        checkpointer.save(2, _state(), None)
    assert place.calls == ["begin", "write", "publish", "release", "remove", "sweep"]
    assert place.steps() == [2]


def test_a_failed_save_is_abandoned_and_nothing_is_removed_for_it(tmp_path: pathlib.Path) -> None:
    place = Unwritable(tmp_path)
    place.is_broken = False
    with Checkpointer(place, keep=2, asynchronous=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, _state(), None)
        place.calls.clear()
        place.is_broken = True
        with pytest.raises(CheckpointError, match="no room"):
            checkpointer.save(3, _state(), None)
        assert place.calls == ["begin", "write", "abandon"]
        assert checkpointer.published_step == 2
    assert place.steps() == [2, 1]


def test_the_heartbeat_says_which_part_of_a_save_is_under_way(tmp_path: pathlib.Path) -> None:
    place = Noting(tmp_path)
    beat_writing(Writing.NOTHING)
    with Checkpointer(place, asynchronous=False) as checkpointer:
        checkpointer.save(1, _state(), None)
        assert place.writing["begin"] == Writing.NOTHING
        assert place.writing["write"] == Writing.WRITE
        assert place.writing["publish"] == Writing.PUBLISH
        assert place.writing["release"] == Writing.NOTHING
        beat_writing(Writing.WRITE)
        with pytest.raises(CheckpointError, match="bad"):
            checkpointer.save(2, dict(_BAD), None)
    assert own_heartbeat().writing == Writing.NOTHING


def test_the_published_step_is_known_once_it_is_published(tmp_path: pathlib.Path) -> None:
    seen: list[int] = []

    class Watched(DirectoryStorage):
        def publish(self, step: int, save_id: str, manifest: bytes) -> None:
            seen.append(checkpointer.published_step)
            super().publish(step, save_id, manifest)

    with Checkpointer(Watched(tmp_path)) as checkpointer:
        assert checkpointer.published_step == -1
        for step in (0, 7):
            checkpointer.save(step, _state(), None)
            checkpointer.wait()
            assert checkpointer.published_step == step
        checkpointer.save(8, dict(_BAD), None)
        with pytest.raises(CheckpointError, match="bad"):
            checkpointer.wait()
        assert checkpointer.published_step == 7
    assert seen == [-1, 0]


class Held(DirectoryStorage):
    """A directory that publishes once the test allows it, and says when a save was abandoned."""

    def __init__(self, directory: pathlib.Path) -> None:
        super().__init__(directory)
        self.may_publish = threading.Event()
        self.abandoned = threading.Event()
        self.fails = False

    def publish(self, step: int, save_id: str, manifest: bytes) -> None:
        assert self.may_publish.wait(_PATIENCE_S)
        if self.fails:
            raise CheckpointError("lost")
        super().publish(step, save_id, manifest)

    def abandon(self, step: int, save_id: str) -> None:
        super().abandon(step, save_id)
        self.abandoned.set()


def test_training_goes_on_while_a_save_is_written(tmp_path: pathlib.Path) -> None:
    place = Held(tmp_path)
    state = _state(3.0)
    with Checkpointer(place) as checkpointer:
        assert not checkpointer.failed
        checkpointer.save(1, state, None)  # Returns although nothing may be published yet.
        assert not checkpointer.failed
        assert (place.steps(), checkpointer.published_step) == ([], -1)
        place.may_publish.set()
        checkpointer.wait()
        assert not checkpointer.failed
    assert place.steps() == [1]


def test_a_failure_is_known_without_waiting_and_raised_once(tmp_path: pathlib.Path) -> None:
    place = Held(tmp_path)
    place.fails = True
    checkpointer = Checkpointer(place)
    checkpointer.save(1, _state(), None)
    assert not checkpointer.failed
    place.may_publish.set()
    assert place.abandoned.wait(_PATIENCE_S)
    assert checkpointer.failed
    with pytest.raises(CheckpointError, match="lost"):
        checkpointer.wait()
    assert not checkpointer.failed
    checkpointer.wait()
    checkpointer.close()


def test_closing_waits_for_the_save_and_hides_its_error(tmp_path: pathlib.Path) -> None:
    for fails in (False, True):
        place = Held(tmp_path / str(fails))
        place.fails = fails
        checkpointer = Checkpointer(place)
        checkpointer.save(1, _state(), None)
        place.may_publish.set()
        checkpointer.close()
        assert place.steps() == ([] if fails else [1])
        assert not checkpointer.failed


@pytest.mark.parametrize("raised", [ZeroDivisionError, None])
def test_an_error_of_training_is_not_replaced_by_one_of_a_save(
    tmp_path: pathlib.Path, raised: type[Exception] | None
) -> None:
    place = Held(tmp_path)
    place.fails = True
    place.may_publish.set()

    def train() -> None:
        with Checkpointer(place) as checkpointer:
            checkpointer.save(1, _state(), None)
            if raised is not None:
                raise raised

    with pytest.raises(raised or CheckpointError):
        train()


def test_the_state_is_let_go_once_it_is_written(tmp_path: pathlib.Path) -> None:
    """A checkpointer keeps a save until the next one; the state may be large."""
    alive: list[bool] = []

    class Watched(DirectoryStorage):
        def release(self, step: int, save_id: str) -> None:
            gc.collect()
            alive.append(kept() is not None)
            super().release(step, save_id)

        def publish(self, step: int, save_id: str, manifest: bytes) -> None:
            assert is_dropped.wait(_PATIENCE_S)
            super().publish(step, save_id, manifest)

    is_dropped = threading.Event()
    with Checkpointer(Watched(tmp_path)) as checkpointer:
        tensor = torch.ones(4)
        kept = weakref.ref(tensor)
        checkpointer.save(1, {"x": tensor}, None)
        del tensor
        is_dropped.set()
        checkpointer.wait()
    assert alive == [False]


def test_all_waiting_for_checkpoints_is_counted(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([10.0, 12.5, 100.0, 101.0, 200.0, 204.0])
    clock = types.SimpleNamespace(perf_counter=lambda: next(times))
    monkeypatch.setattr("paceline.checkpoint.checkpointer.time", clock)
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        assert checkpointer.stall_s == 0.0
        checkpointer.save(1, _state(), None)
        assert checkpointer.stall_s == 2.5
        with pytest.raises(CheckpointError, match="bad"):
            checkpointer.save(2, dict(_BAD), None)
        assert checkpointer.stall_s == 3.5
        checkpointer.save(3, _state(), None)
        assert checkpointer.stall_s == 7.5


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_no_checkpoint_is_refused(tmp_path: pathlib.Path, keep: int) -> None:
    with pytest.raises(CheckpointError, match=f"keep at least one checkpoint, not {keep}"):
        Checkpointer(tmp_path, keep=keep)
    Checkpointer(tmp_path, keep=1).close()


def test_a_failure_to_remove_an_old_checkpoint_is_raised_and_the_new_one_stays(
    tmp_path: pathlib.Path,
) -> None:
    class Stuck(DirectoryStorage):
        def remove(self, step: int) -> None:
            raise CheckpointError(f"step {step} is stuck")

    place = Stuck(tmp_path)
    checkpointer = Checkpointer(place, keep=1, asynchronous=False)
    checkpointer.save(1, _state(), None)
    with pytest.raises(CheckpointError, match="step 1 is stuck"):
        checkpointer.save(2, _state(), None)
    assert checkpointer.published_step == 2
    assert place.steps() == [2, 1]
    checkpointer.close()


def test_only_the_first_rank_begins_publishes_removes_and_sweeps(tmp_path: pathlib.Path) -> None:
    places = [Noting(tmp_path), Noting(tmp_path)]
    with checkpoint_ranks(2) as ranks:

        def program(rank: int) -> int:
            checkpointer = Checkpointer(places[rank], keep=1, asynchronous=False)
            for step in (1, 2):
                state = {"x": FlatPiece.of(torch.ones(4) * rank, 4 * rank, 8)}
                checkpointer.save(step, state, None)
            checkpointer.close()
            return checkpointer.published_step

        assert ranks.run(program) == [2, 2]
        assert len(ranks.destroyed) == 2
    first, second = (place.calls for place in places)
    assert first == [
        *("sweep", "begin", "write", "publish", "release", "sweep"),
        *("begin", "write", "publish", "release", "remove", "sweep"),
    ]
    assert second == ["write", "release"] * 2
    assert places[0].steps() == [2]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_one_rank_is_raised_on_all_and_the_first_removes_the_save(
    tmp_path: pathlib.Path, failing: int
) -> None:
    places = [Unwritable(tmp_path), Unwritable(tmp_path)]
    places[1 - failing].is_broken = False
    with checkpoint_ranks(2) as ranks:

        def program(rank: int) -> str:
            checkpointer = Checkpointer(places[rank], asynchronous=False)
            state = {"x": FlatPiece.of(torch.ones(4) * rank, 4 * rank, 8)}
            with pytest.raises(CheckpointError) as error:
                checkpointer.save(1, state, None)
            checkpointer.close()
            return str(error.value)

        messages = ranks.run(program)
    assert messages == [f"saving {tmp_path}, step 1: rank {failing}: no room"] * 2
    assert places[0].calls == ["sweep", "begin", "write", "abandon"]
    assert places[1].calls == ["write", "release"]
    assert list(tmp_path.iterdir()) == []
