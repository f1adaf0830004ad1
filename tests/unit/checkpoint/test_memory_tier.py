"""Tests of what a run says of its memory, and of which damage in it hides a state."""

import pathlib
from typing import Any

import pytest
import torch

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.memory import MemoryCheckpointer, MemoryTier, load_newest_in_memory
from paceline.checkpoint.restore import Source
from paceline.checkpoint.storage import DirectoryStorage


@pytest.fixture
def place(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "memory").mkdir()
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def _memory(place: pathlib.Path) -> MemoryCheckpointer:
    return MemoryCheckpointer(str(place / "memory"), str(place / "checkpoints"))


def _tier(place: pathlib.Path) -> MemoryTier:
    return MemoryTier(str(place / "memory"), str(place / "checkpoints"))


def _state(value: float) -> dict[str, Any]:
    return {"x": torch.full((4,), value), "y": torch.full((4,), value)}


def _save(place: pathlib.Path, *steps: int) -> None:
    """Leaves several steps in memory, as a process that ends between publishing and removing."""
    memory = _memory(place)
    memory.memory.remove_others = lambda step: None  # type: ignore[method-assign]
    for step in steps:
        memory.save(step, _state(step), None, {"on_disk": -1})
        memory.wait()
    memory.close()


def _file(place: pathlib.Path, step: int, name: str) -> pathlib.Path:
    (found,) = (place / "memory").glob(f"paceline-*/step-{step:08d}/{name}")
    return found


def _flip(path: pathlib.Path, byte: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


def _load(place: pathlib.Path, on_disk: int = -1) -> tuple[int | None, float, list[str]]:
    """Returns the restored step, a number of its state, and the notices."""
    state = {"x": torch.zeros(4)}  # A part of the state.

    def load(source: Source) -> None:
        source.load(state)

    tier = _tier(place)
    restored = tier.load(load, on_disk)
    return None if restored is None else restored.step, float(state["x"][0]), tier.notices


def test_of_several_states_the_newest_is_loaded_and_the_others_freed(place: pathlib.Path) -> None:
    _save(place, 5, 6)
    assert _load(place) == (6, 6.0, ["step 6 was restored from memory"])
    (held,) = (place / "memory").iterdir()
    assert [path.name for path in held.glob("step-*")] == ["step-00000006"]


def test_a_state_without_an_intact_manifest_does_not_hide_an_older_one(place: pathlib.Path) -> None:
    _save(place, 5, 6)
    _flip(_file(place, 6, "manifest.json"), byte=40)
    assert _load(place) == (5, 5.0, ["step 5 was restored from memory"])


def test_a_state_that_lacks_a_file_or_a_part_of_it_is_passed_over(place: pathlib.Path) -> None:
    _save(place, 4, 5, 6)
    file = "rank-00000-00000.safetensors"
    _file(place, 6, file).unlink()
    _file(place, 5, file).write_bytes(_file(place, 5, file).read_bytes()[:-1])
    step, value, notices = _load(place)
    assert (step, value) == (4, 4.0)
    missing = f"1 of 1 files are not in the memory of any host, such as {file} of rank 0"
    assert notices == [
        f"memory: step 6: {missing}",
        f"memory: step 5: {missing}",
        "step 4 was restored from memory",
    ]


def test_damage_to_what_was_not_asked_for_is_found_in_memory_too(place: pathlib.Path) -> None:
    """`y` follows `x` in the file, and only `x` is loaded."""
    _save(place, 5, 6)
    _flip(_file(place, 6, "rank-00000-00000.safetensors"))
    step, value, notices = _load(place)
    assert (step, value) == (5, 5.0)
    assert len(notices) == 3  # Of the original, of its replica, of what was restored.
    assert all("tensor 'y', saved by rank 0, is corrupted" in notice for notice in notices[:2])


@pytest.mark.parametrize("on_disk", [-1, 0, 3])
def test_corrupted_memory_is_an_error_only_where_the_disk_has_nothing(
    place: pathlib.Path, on_disk: int
) -> None:
    _save(place, 5)
    _flip(_file(place, 5, "rank-00000-00000.safetensors"))
    if on_disk >= 0:
        step, _, notices = _load(place, on_disk)
        assert step is None
        assert all("is corrupted" in notice for notice in notices)
    else:
        with pytest.raises(
            CheckpointError,
            match=r"in memory is corrupted and there is none on disk: .*tensor 'y'.*it was removed",
        ):
            _load(place, on_disk)
    # The next try starts from the disk, or from the beginning.
    assert _load(place, on_disk) == (None, 0.0, [])


def test_an_incomplete_memory_without_a_disk_starts_from_the_beginning(place: pathlib.Path) -> None:
    _save(place, 5)
    _file(place, 5, "rank-00000-00000.safetensors").unlink()
    step, _, (notice,) = _load(place)
    assert step is None
    assert "are not in the memory of any host" in notice


def test_failures_are_reported_once_until_a_save_succeeds(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = _tier(place)
    publish = DirectoryStorage.publish
    failing = {1, 2, 4}

    def publish_or_fail(
        location: DirectoryStorage, step: int, save_id: str, manifest: bytes
    ) -> None:
        if step in failing:
            raise CheckpointError(f"no room for {step}")
        publish(location, step, save_id, manifest)

    monkeypatch.setattr(DirectoryStorage, "publish", publish_or_fail)
    seen = []
    for step in range(1, 7):  # A save reports the failure of the one before.
        tier.save(step, _state(step), None, {}, -1)
        seen.append(len(tier.notices))
    assert seen == [0, 1, 1, 1, 2, 2]
    assert [notice.rpartition(": ")[2] for notice in tier.notices] == [
        "no room for 1",
        "no room for 4",
    ]
    assert all(
        notice.startswith("checkpoint not saved in memory, training continues")
        for notice in tier.notices
    )
    tier.finish()
    assert list((place / "memory").iterdir()) == []


def test_a_failed_save_does_not_keep_a_run_from_forgetting_or_finishing(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise CheckpointError("lost")

    tier = _tier(place)
    tier.save(1, _state(1), None, {}, -1)
    tier.forget()
    monkeypatch.setattr(DirectoryStorage, "publish", fail)
    tier.save(2, _state(2), None, {}, -1)
    tier.forget()
    tier.save(3, _state(3), None, {}, -1)
    tier.finish()
    assert tier.notices == []
    assert list((place / "memory").iterdir()) == []


def test_a_tier_without_memory_says_so_and_does_nothing(place: pathlib.Path) -> None:
    (place / "memory").rmdir()
    tier = _tier(place)
    (notice,) = tier.notices
    assert notice.startswith("checkpoints in memory are off: ")
    assert str(place / "memory") in notice
    tier.save(1, _state(1), None, {}, -1)
    assert tier.load(lambda source: source.load({}), -1) is None
    tier.forget()
    tier.finish()
    assert tier.notices == [notice]


def test_a_closed_memory_is_no_longer_held(place: pathlib.Path) -> None:
    memory = _memory(place)
    memory.close()
    memory.close()
    assert memory.group is None
    assert memory.memory._held is None


def test_what_must_not_be_loaded_is_not_tried(place: pathlib.Path) -> None:
    _save(place, 5, 6)
    memory = _memory(place)
    tried: list[int] = []

    def load(source: Source) -> None:
        tried.append(source.checkpoint.step)
        source.load(_state(0))

    found = load_newest_in_memory(memory, load, lambda manifest: "no" * (manifest.step == 6))
    memory.close()
    assert tried == [5]
    assert found.restored is not None
    assert [(finding.name, finding.message) for finding in found.findings] == [
        ("unwanted", "step 6: no")
    ]
    assert found.received_bytes == 0
