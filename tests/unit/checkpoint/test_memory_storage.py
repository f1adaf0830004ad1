"""Tests of a run's memory on a host: ownership, permissions and cleanup."""

import os
import pathlib

import pytest

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.memory import Hosts
from paceline.checkpoint.memory_storage import MemoryStorage, run_token


def _open(root: pathlib.Path, run: pathlib.Path) -> MemoryStorage:
    return MemoryStorage(root, str(run / "token"), run_token(run / "token"))


def test_a_run_finds_its_memory_again_and_another_run_does_not(tmp_path: pathlib.Path) -> None:
    first = _open(tmp_path, tmp_path / "run")
    again = _open(tmp_path, tmp_path / "run")
    other = _open(tmp_path, tmp_path / "other")
    assert again.directory == first.directory
    assert again.host == first.host
    assert other.directory != first.directory
    assert other.host != first.host
    assert first.directory.stat().st_mode & 0o777 == 0o700


def test_a_run_that_begins_again_does_not_find_the_memory_of_the_one_before(
    tmp_path: pathlib.Path,
) -> None:
    """Whoever removes a run's checkpoints starts over: its memory belongs to the run before."""
    first = _open(tmp_path, tmp_path / "run")
    first.close()
    (tmp_path / "run" / "token").unlink()
    assert _open(tmp_path, tmp_path / "run").directory != first.directory


@pytest.mark.parametrize("mode", [0o710, 0o720, 0o740, 0o701, 0o702, 0o704])
def test_memory_that_a_group_or_others_can_open_is_refused(
    tmp_path: pathlib.Path, mode: int
) -> None:
    place = _open(tmp_path, tmp_path / "run")
    place.directory.chmod(mode)
    with pytest.raises(CheckpointError, match="other users can open it"):
        _open(tmp_path, tmp_path / "run")


def test_memory_of_a_run_that_is_gone_is_swept(tmp_path: pathlib.Path) -> None:
    held, gone, silent, recent = (_open(tmp_path, tmp_path / name) for name in "abcd")
    for place in (gone, silent, recent):
        place.close()
    (tmp_path / "a" / "token").unlink()
    (tmp_path / "b" / "token").unlink()
    day_ago = silent.directory.stat().st_mtime - 25 * 3600
    os.utime(silent.directory, (day_ago, day_ago))
    foreign = tmp_path / "paceline-foreign"
    foreign.mkdir()
    _open(tmp_path, tmp_path / "next")
    assert held.directory.exists()  # Held by this process.
    assert recent.directory.exists()
    assert foreign.exists()
    assert not gone.directory.exists()
    assert not silent.directory.exists()


def test_memory_that_others_could_have_written_to_is_refused(tmp_path: pathlib.Path) -> None:
    place = _open(tmp_path, tmp_path / "run")
    place.directory.chmod(0o755)
    with pytest.raises(CheckpointError, match="other users can open it"):
        _open(tmp_path, tmp_path / "run")
    place.remove_all()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place.directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="other users can open it"):
        _open(tmp_path, tmp_path / "run")


def test_memory_of_another_user_is_refused_though_nobody_else_can_open_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = _open(tmp_path, tmp_path / "run")
    assert place.directory.stat().st_mode & 0o777 == 0o700
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(CheckpointError, match="belongs to another user"):
        _open(tmp_path, tmp_path / "run")


def test_room_for_a_replica_is_there_or_an_error(tmp_path: pathlib.Path) -> None:
    place = _open(tmp_path, tmp_path / "run")
    path = place.reserve(1, "id", "a.safetensors", 100)
    assert path.stat().st_size == 100
    with pytest.raises(CheckpointError, match=r"a\.safetensors: File exists"):
        place.reserve(1, "id", "a.safetensors", 100)


@pytest.mark.parametrize(
    ("names", "keepers"),
    [
        ("a", [None]),
        ("aaa", [1, 2, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("abab", [1, 0, 3, 2]),
        ("aabbcc", [2, 3, 4, 5, 0, 1]),
        ("aab", [2, 2, 0]),
    ],
)
def test_the_counterpart_on_the_next_host_keeps_the_replica(
    names: str, keepers: list[int | None]
) -> None:
    hosts = Hosts(rank=0, names=tuple(names))
    assert [hosts.keeper(rank) for rank in range(len(names))] == keepers
    leaders = [rank for rank in range(len(names)) if Hosts(rank=rank, names=tuple(names)).is_leader]
    assert leaders == [names.index(name) for name in dict.fromkeys(names)]
