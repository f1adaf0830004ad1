"""Tests of the order in which a location makes a step durable, and of what it removes and names."""

import contextlib
import os
import pathlib
import re

import pytest
from msgspec import Raw

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.format import Manifest, encode_manifest
from paceline.checkpoint.storage import (
    BucketStorage,
    DirectoryStorage,
    open_checkpoints,
    parse_step,
    step_name,
)
from paceline.data.storage import LocalStorage

_MANIFEST = "manifest.json"


@pytest.fixture
def durable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns what is synchronised with the disk, and what is renamed, in order."""
    found: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(descriptor: int) -> None:
        found.append(pathlib.Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def noted_rename(source: pathlib.Path, target: pathlib.Path) -> None:
        found.append(f"{pathlib.Path(source).name} -> {pathlib.Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    return found


def test_everything_is_on_disk_before_the_rename_and_the_rename_after_it(
    tmp_path: pathlib.Path, durable: list[str]
) -> None:
    """A step that a power cut leaves has all its bytes, and one that was reported is there."""
    place = DirectoryStorage(tmp_path / "checkpoints")
    place.begin(7, "id")
    for name in ("a", "b"):
        place.write(7, "id", name, [b"abc"])
    place.publish(7, "id", b"{}")
    assert durable == [
        *("a", "b", _MANIFEST, "step-00000007.tmp-id"),
        *("step-00000007.tmp-id -> step-00000007", "checkpoints"),
    ]


def test_names_of_steps_sort_like_steps_and_other_names_are_no_steps(
    tmp_path: pathlib.Path,
) -> None:
    steps = [0, 9, 10, 12_345_678, 123_456_789]
    assert [parse_step(step_name(step)) for step in steps] == steps
    assert sorted(map(step_name, steps[:-1])) == [step_name(step) for step in steps[:-1]]
    for name in ("step-1", "step-0000001", "xstep-00000001", "step-00000001.tmp-a", "step-"):
        assert parse_step(name) is None
    for step in steps:
        (tmp_path / step_name(step)).mkdir()
    (tmp_path / step_name(5)).write_text("a file")
    (tmp_path / "step-00000006.damaged-x").mkdir()
    assert DirectoryStorage(tmp_path).steps() == sorted(steps, reverse=True)
    assert DirectoryStorage(tmp_path / "absent").steps() == []


def test_a_sweep_names_what_it_removed(tmp_path: pathlib.Path) -> None:
    place = DirectoryStorage(tmp_path)
    assert DirectoryStorage(tmp_path / "absent").sweep() == []
    names = ["step-00000002.tmp-a", "step-00000010.tmp-b"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000001").mkdir()
    assert place.sweep() == names
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert place.sweep() == []


def test_a_save_is_held_by_every_process_that_takes_part_until_it_lets_go(
    tmp_path: pathlib.Path,
) -> None:
    first, second, other = (DirectoryStorage(tmp_path) for _ in range(3))
    first.begin(1, "id")
    second.write(1, "id", "a", [b"x"])
    second.write(1, "id", "b", [b"x"])
    assert other.sweep() == []
    first.release(1, "id")
    assert other.sweep() == []
    second.release(1, "id")
    second.release(1, "id")
    assert other.sweep() == ["step-00000001.tmp-id"]


def _open_below(directory: pathlib.Path) -> list[str]:
    """Returns what this process has open below a directory."""
    found = []
    for descriptor in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # It was open only to list the others.
            found.append(str(descriptor.readlink()))
    return [path for path in found if path.startswith(str(directory))]


def test_saves_that_are_over_hold_nothing_open(tmp_path: pathlib.Path) -> None:
    place = DirectoryStorage(tmp_path)
    for step in range(5):
        place.begin(step, "id")
        place.write(step, "id", "a", [b"x"])
        place.publish(step, "id", b"{}")
    place.begin(9, "id")
    assert _open_below(tmp_path) == [str(tmp_path / "step-00000009.tmp-id")]
    place.abandon(9, "id")
    assert _open_below(tmp_path) == []
    assert place.steps() == [4, 3, 2, 1, 0]


def test_a_step_that_is_removed_in_part_does_not_count_and_is_swept(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = DirectoryStorage(tmp_path)
    place.begin(1, "id")
    place.publish(1, "id", b"{}")

    def fail(path: pathlib.Path) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr("shutil.rmtree", fail)
        with pytest.raises(CheckpointError, match=r"step-00000001: Input/output error, so it can"):
            place.remove(1)
    assert place.steps() == []
    (swept,) = place.sweep()
    assert re.fullmatch(r"step-00000001\.tmp-[0-9a-f]{8}", swept)
    with pytest.raises(CheckpointError, match=r"step-00000001: No such file or directory, so it"):
        place.quarantine(1, "id")


class Bucket(LocalStorage):
    """A bucket on disk that notes what is deleted."""

    def __init__(self, directory: pathlib.Path) -> None:
        super().__init__(directory)
        self.deleted: list[str] = []

    def delete(self, name: str) -> None:
        self.deleted.append(name)
        super().delete(name)


def _manifest(step: int, save_id: str) -> bytes:
    return encode_manifest(
        Manifest(
            schema=1,
            step=step,
            save_id=save_id,
            world_size=1,
            block_bytes=1,
            identity=Raw(b"null"),
            ranks=[],
            values={},
            tensors={},
            files=[],
        )
    )


@pytest.fixture
def bucket(tmp_path: pathlib.Path) -> Bucket:
    return Bucket(tmp_path)


def _publish(place: BucketStorage, step: int, save_id: str) -> None:
    place.begin(step, save_id)
    assert place.write(step, save_id, "a", [b"ab", memoryview(b"c")]) == f"{save_id}/a"
    place.write(step, save_id, "b", [])
    assert place.sizes(step, save_id) == {f"{save_id}/a": 3, f"{save_id}/b": 0}
    place.publish(step, save_id, _manifest(step, save_id))


def test_a_step_in_a_bucket_is_removed_as_a_whole_its_manifest_first(bucket: Bucket) -> None:
    place = BucketStorage(bucket)
    for step in (3, 12):
        _publish(place, step, "id")
    assert place.steps() == [12, 3]
    place.remove(3)
    assert bucket.deleted == [
        *(f"step-00000003/{_MANIFEST}", "step-00000003/id/a", "step-00000003/id/b")
    ]
    assert place.steps() == [12]
    assert {name.split("/")[0] for name in bucket.sizes()} == {"step-00000012"}


def test_a_failed_save_in_a_bucket_takes_only_its_own_objects_with_it(bucket: Bucket) -> None:
    place = BucketStorage(bucket)
    for save_id in ("one", "two"):
        place.write(4, save_id, "a", [b"x"])
    place.release(4, "one")
    place.abandon(4, "one")
    assert list(bucket.sizes()) == ["step-00000004/two/a"]


def test_a_step_in_a_bucket_is_not_begun_again_nor_published_by_another(bucket: Bucket) -> None:
    place = BucketStorage(bucket)
    _publish(place, 3, "one")
    with pytest.raises(CheckpointError, match=r"step-00000003 already exists"):
        place.begin(3, "two")
    place.begin(4, "two")
    with pytest.raises(CheckpointError, match="another run has saved this step here"):
        place.publish(3, "two", b"{}")
    place.publish(3, "one", _manifest(3, "one"))  # The answer to the first may have been lost.


def test_a_sweep_of_a_bucket_takes_what_no_manifest_names(bucket: Bucket) -> None:
    place = BucketStorage(bucket)
    assert place.sweep() == []
    place.write(0, "early", "a", [b"x"])
    assert place.sweep() == []  # Nothing is published: the save may be in flight.
    _publish(place, 2, "kept")
    place.write(2, "lost", "a", [b"x"])
    place.write(1, "lost", "a", [b"x"])
    place.write(3, "running", "a", [b"x"])
    bucket.write("notes/a", b"mine")
    expected = ["step-00000000/early/a", "step-00000001/lost/a", "step-00000002/lost/a"]
    assert sorted(place.sweep()) == expected
    assert sorted(bucket.deleted) == expected
    assert sorted(bucket.sizes()) == [
        *("notes/a", "step-00000002/kept/a", "step-00000002/kept/b"),
        *(f"step-00000002/{_MANIFEST}", "step-00000003/running/a"),
    ]
    assert place.sweep() == []


def test_a_damaged_step_in_a_bucket_is_set_aside_with_its_files(bucket: Bucket) -> None:
    place = BucketStorage(bucket)
    _publish(place, 2, "bad")
    place.quarantine(2, "x")
    assert place.steps() == []
    _publish(place, 2, "good")
    _publish(place, 3, "next")
    assert place.sweep() == []  # Which files belong to the damaged one is not known.
    assert f"step-00000002/{_MANIFEST}.damaged-x" in bucket.sizes()
    assert place.steps() == [3, 2]


def test_a_place_is_opened_by_its_kind(tmp_path: pathlib.Path) -> None:
    assert isinstance(open_checkpoints(tmp_path), DirectoryStorage)
    assert open_checkpoints(str(tmp_path)).url == str(tmp_path)
    assert isinstance(open_checkpoints("s3://bucket/prefix"), BucketStorage)
    assert open_checkpoints("s3://bucket/prefix").url == "s3://bucket/prefix"
