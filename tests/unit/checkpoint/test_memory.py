"""Tests of which state a run goes on from: one in memory, or one on disk."""

import pathlib

import pytest

from paceline.checkpoint.memory import MemoryCheckpointer, MemoryTier
from paceline.checkpoint.restore import Source
from paceline.checkpoint.state import load_training_state
from tests.unit.checkpoint.runs import SmallRun, equal


@pytest.fixture
def place(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "memory").mkdir()
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def _save(place: pathlib.Path, step: int, run: SmallRun, *, on_disk: int) -> None:
    memory = MemoryCheckpointer(str(place / "memory"), str(place / "checkpoints"))
    memory.save(step, run.state(), {"step": step}, {"on_disk": on_disk})
    memory.wait()
    memory.close()


def _load(place: pathlib.Path, run: SmallRun, *, on_disk: int) -> tuple[int | None, list[str]]:
    def load(source: Source) -> None:
        load_training_state(source, run.model, {"main": run.optimizer})

    tier = MemoryTier(str(place / "memory"), str(place / "checkpoints"))
    restored = tier.load(load, on_disk)
    return None if restored is None else restored.step, tier.notices


def _trained() -> SmallRun:
    run = SmallRun()
    run.step()
    return run


@pytest.mark.parametrize("on_disk", [-1, 3, 5])
def test_a_state_in_memory_is_loaded_unless_a_newer_one_is_on_disk(
    place: pathlib.Path, on_disk: int
) -> None:
    saved, run = _trained(), SmallRun(seed=9)
    _save(place, 5, saved, on_disk=min(on_disk, 3))
    assert _load(place, run, on_disk=on_disk) == (5, ["step 5 was restored from memory"])
    assert equal(run.numbers(), saved.numbers())


def test_a_newer_state_on_disk_is_preferred_and_memory_forgotten(place: pathlib.Path) -> None:
    _save(place, 5, _trained(), on_disk=3)
    run = SmallRun(seed=9)
    before = run.numbers()
    step, notices = _load(place, run, on_disk=6)
    assert step is None
    assert notices == ["memory: step 5: step 6 on disk is newer"]
    assert equal(run.numbers(), before)
    assert _load(place, run, on_disk=-1) == (None, [])


def test_memory_of_a_future_that_was_removed_is_not_loaded(place: pathlib.Path) -> None:
    """Whoever removes checkpoints goes back on purpose."""
    _save(place, 5, _trained(), on_disk=4)
    step, (notice,) = _load(place, SmallRun(), on_disk=3)
    assert step is None
    assert notice == "memory: step 5: step 4, which was on disk when it was saved, was removed"


def test_what_is_forgotten_is_not_loaded(place: pathlib.Path) -> None:
    """A run that rolls back forgets the states that it leaves behind."""
    tier = MemoryTier(str(place / "memory"), str(place / "checkpoints"))
    tier.save(5, _trained().state(), {}, {}, on_disk=0)
    tier.forget()
    assert _load(place, SmallRun(), on_disk=0) == (None, [])
