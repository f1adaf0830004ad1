"""Tests of the leftovers of killed and failed saves, and of which checkpoints are kept."""

import os
import pathlib
from collections.abc import Iterator

import pytest

from paceline.checkpoint.catalog import complete_steps, keep_last
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.storage import DirectoryStorage, open_checkpoints
from tests.unit.checkpoint.runs import SmallRun, save_steps
from tests.unit.data.s3_server import s3_server


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as bucket:
        yield bucket


def test_attempts_that_nobody_holds_are_swept(tmp_path: pathlib.Path) -> None:
    save_steps(tmp_path, [1])
    held, dead = DirectoryStorage(tmp_path), DirectoryStorage(tmp_path)
    held.begin(2, "held")
    dead.begin(3, "dead")
    dead.write(3, "dead", "rank-00000-00000.safetensors", [b"half"])
    dead.release(3, "dead")
    (tmp_path / "step-00000004.tmp-note").write_text("a file, not a directory")
    (tmp_path / "notes.tmp-mine").mkdir()
    Checkpointer(tmp_path).close()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {
        *("step-00000001", "step-00000002.tmp-held"),
        *("step-00000004.tmp-note", "notes.tmp-mine"),
    }
    held.abandon(2, "held")
    assert not (tmp_path / "step-00000002.tmp-held").exists()


def test_what_is_damaged_is_neither_counted_nor_removed(tmp_path: pathlib.Path) -> None:
    save_steps(tmp_path, [1, 2, 3, 4])
    (tmp_path / "step-00000003" / "rank-00000-00000.safetensors").unlink()
    (tmp_path / "step-00000004" / "manifest.json").write_text("{}")
    place = open_checkpoints(tmp_path)
    assert list(complete_steps(place)) == [2, 1]
    assert keep_last(place, 2) == []
    assert keep_last(place, 1) == [1]
    assert place.steps() == [4, 3, 2]
    with pytest.raises(CheckpointError, match="at least one"):
        keep_last(place, 0)


def test_failed_saves_leave_the_one_before(tmp_path: pathlib.Path) -> None:
    run = SmallRun()
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, run.state(), None)
        checkpointer.save(2, {"bad": {1}}, None)  # Fails on the writer thread.
        with pytest.raises(CheckpointError, match=r"step 2: rank 0: bad: a checkpoint can contain"):
            checkpointer.wait()
        assert not checkpointer.failed
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        checkpointer.save(3, {"bad": {1}}, None)
        with pytest.raises(CheckpointError, match="step 3"):
            checkpointer.save(4, run.state(), None)
        checkpointer.save(4, run.state(), None)
    assert open_checkpoints(tmp_path).steps() == [4]


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with (
        Checkpointer(tmp_path / "file" / "checkpoints", asynchronous=False) as checkpointer,
        pytest.raises(CheckpointError, match=r"file.*Not a directory, so this checkpoint was not"),
    ):
        checkpointer.save(1, SmallRun().state(), None)


def test_attempts_in_a_bucket_are_swept_once_a_newer_step_is_there(s3: str) -> None:
    url = f"{s3}/{os.urandom(4).hex()}"
    place = open_checkpoints(url)
    for step, save_id in ((1, "killed"), (2, "killed"), (3, "killed")):
        place.write(step, save_id, "rank-00000-00000.safetensors", [b"half"])
    save_steps(url, [2])
    assert place.steps() == [2]
    assert list(place.storage(1).sizes()) == []
    assert len(place.storage(2).sizes()) == 2
    assert len(place.storage(3).sizes()) == 1  # The save may be in flight.
    place.quarantine(2, "x")
    assert place.steps() == []
    save_steps(url, [4])
    assert len(place.storage(2).sizes()) == 2  # Kept for inspection.
