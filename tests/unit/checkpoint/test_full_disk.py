"""Tests of full, read-only and failing disks: they are named, and the last checkpoint stays."""

import errno
import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest

from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.errors import CheckpointError
from tests.unit.checkpoint.runs import SmallRun, equal, save_steps

_PAGE = 4096


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a file system of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this machine mounts no tmpfs")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def _free_bytes(disk: pathlib.Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def _save(place: pathlib.Path, run: SmallRun, step: int, *, asynchronous: bool) -> None:
    # One tensor per file, so that many different writes can fail.
    with Checkpointer(place, asynchronous=asynchronous, max_file_bytes=1) as checkpointer:
        checkpointer.save(step, run.state(), {"step": step})


def _failure(place: pathlib.Path, run: SmallRun, *, asynchronous: bool) -> str:
    try:
        _save(place, run, 2, asynchronous=asynchronous)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_full_at_every_write(small_disk: pathlib.Path, asynchronous: bool) -> None:
    place = small_disk / "checkpoints"
    saved = save_steps(place, [1])
    run = SmallRun(seed=4)
    run.step()
    num_failures, named = 0, set()
    for room in range(0, _free_bytes(small_disk), _PAGE):
        (small_disk / "ballast").write_bytes(bytes(_free_bytes(small_disk) - room))
        message = _failure(place, run, asynchronous=asynchronous)
        if not message:
            break
        num_failures += 1
        assert "No space left on device, so this checkpoint was not saved" in message
        assert "free disk space" in message
        named.add(message.partition("rank 0: ")[2].partition(": No space")[0])
        assert [path.name for path in place.iterdir()] == ["step-00000001"]
        other = SmallRun(seed=5)
        restored = other.load(place)
        assert restored is not None
        assert restored.step == 1
        assert equal(other.numbers(), saved[1])
        (small_disk / "ballast").unlink()
    assert num_failures > 10
    assert len(named) > 10  # Each error names the file that did not fit.
    assert any(name.endswith("manifest.json") for name in named)
    assert SmallRun().load(place).step == 2  # type: ignore[union-attr]


def test_a_read_only_disk(small_disk: pathlib.Path) -> None:
    place = small_disk / "checkpoints"
    save_steps(place, [1])
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(CheckpointError, match=r"Read-only file system.*name a place that can be"):
        _save(place, SmallRun(), 2, asynchronous=True)
    assert SmallRun().load(place).step == 1  # type: ignore[union-attr]


def test_a_failing_disk(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save_steps(tmp_path, [1])
    synchronise = os.fsync
    for failing in range(6):
        calls = iter(range(100))

        def fail(descriptor: int, calls: Iterator[int] = calls, failing: int = failing) -> None:
            if next(calls) == failing:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            synchronise(descriptor)

        monkeypatch.setattr("os.fsync", fail)
        with pytest.raises(
            CheckpointError, match=r"step-00000002.*Input/output error.*disk is failing"
        ):
            _save(tmp_path, SmallRun(), 2, asynchronous=False)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    monkeypatch.undo()
    other = SmallRun(seed=5)
    other.load(tmp_path)
    assert equal(other.numbers(), saved[1])


@pytest.mark.parametrize("failing", ["iterdir", "is_dir"])
def test_a_disk_that_cannot_be_listed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    save_steps(tmp_path, [1])

    def fail(path: pathlib.Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(pathlib.Path, failing, fail)
    with pytest.raises(
        CheckpointError, match=r"Input/output error, so its checkpoints cannot be listed"
    ):
        SmallRun().load(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"Input/output error, so its checkpoints cannot be listed"
    ):
        _save(tmp_path, SmallRun(), 2, asynchronous=False)
    monkeypatch.undo()
    assert SmallRun().load(tmp_path).step == 1  # type: ignore[union-attr]


def test_a_file_that_cannot_be_read_is_passed_over(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_steps(tmp_path, [1, 2])
    read_range = "paceline.data.storage.LocalStorage.read_range"
    from paceline.data.storage import LocalStorage

    original = LocalStorage.read_range

    def fail(storage: LocalStorage, name: str, start: int, end: int) -> bytes:
        if "step-00000002" in storage.url:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(storage, name, start, end)

    monkeypatch.setattr(read_range, fail)
    other = SmallRun(seed=5)
    restored = other.load(tmp_path)
    assert restored is not None
    assert "rank-00000-00000.safetensors: Input/output error" in restored.passed_over[0].message
    assert equal(other.numbers(), saved[1])
