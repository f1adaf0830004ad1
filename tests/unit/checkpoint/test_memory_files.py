"""Tests of the files of a run's memory on one host, and of the messages that carry them."""

import dataclasses
import os
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.memory_storage import (
    MemoryFiles,
    MemoryStorage,
    Messages,
    ReplicaMap,
    run_token,
)


def _open(root: pathlib.Path, run: str = "run") -> MemoryStorage:
    token_file = root.parent / run / "token"
    return MemoryStorage(root, str(token_file), run_token(token_file))


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def test_the_name_of_a_runs_memory_does_not_change(root: pathlib.Path) -> None:
    """A run that goes on with a later version must find it."""
    place = MemoryStorage(root, "/runs/a/memory-token", "0123456789abcdef")
    assert place.directory == root / "paceline-1a363e9a7c48f841f60c58f9"
    assert MemoryStorage(root, "/runs/a/memory-token", "0").directory != place.directory
    assert MemoryStorage(root, "/runs/b/memory-token", "0123456789abcdef").directory != (
        place.directory
    )


def test_nothing_is_there_until_this_host_publishes(root: pathlib.Path) -> None:
    place = _open(root)
    place.begin(3, "id")
    assert place.write(3, "id", "a", [b"ab", memoryview(b"c")]) == "a"
    assert place.own_file(3, "id", "a").read_bytes() == b"abc"
    place.publish(3, "id", b"manifest")
    assert (place.steps(), place.manifest) == ([], b"manifest")
    place.publish_here(3, "id", b"manifest")
    assert place.steps() == [3]
    assert place.storage(3).read("manifest.json") == b"manifest"
    assert place.file_path(3, "a", is_replica=False).read_bytes() == b"abc"


def test_a_host_whose_ranks_have_written_nothing_publishes_too(root: pathlib.Path) -> None:
    place = _open(root)
    place.publish_here(3, "id", b"manifest")
    assert place.storage(3).sizes() == {"manifest.json": 8}


def test_all_but_one_step_or_all_are_removed(root: pathlib.Path) -> None:
    place = _open(root)
    for step in (1, 2, 3):
        place.publish_here(step, "id", b"manifest")
    place.remove_others(2)
    assert place.steps() == [2]
    place.remove_others(None)
    assert place.steps() == []
    assert place.directory.is_dir()
    place.remove_all()
    assert not place.directory.exists()


def test_the_preferred_copy_is_read_and_the_other_where_there_is_none(root: pathlib.Path) -> None:
    place = _open(root)
    for name in ("both", "own"):
        place.write(1, "id", name, [b"original"])
    for name in ("both", "replica"):
        place.reserve(1, "id", name, 4).write_bytes(b"copy")
    place.publish_here(1, "id", b"manifest")
    for prefer_replica, expected in ((False, b"original"), (True, b"copy")):
        files = MemoryFiles(place, 1, prefer_replica=prefer_replica)
        assert files.read("both") == expected
        assert files.read("own") == b"original"
        assert files.read("replica") == b"copy"
        assert not files.path("none").exists()
        files.received = {("own", 2, 4): b"XY"}
        assert files.read_range("own", 2, 4) == b"XY"
        assert files.read_range("own", 2, 5) == b"igi"


def test_what_cannot_be_removed_of_a_stale_memory_does_not_keep_the_rest(
    root: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = _open(root, "gone")
    for number in range(8):
        (stale.directory / f"{'stuck' if number % 2 else 'loose'}-{number}").write_bytes(b"x")
    stale.close()
    (root.parent / "gone" / "token").unlink()
    unlink = os.unlink

    def unlink_or_fail(path: Any, **options: Any) -> None:
        if "stuck" in str(path):
            raise PermissionError(1, "Operation not permitted")
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", unlink_or_fail)
    _open(root)
    assert sorted(path.name for path in stale.directory.iterdir()) == [
        f"stuck-{number}" for number in (1, 3, 5, 7)
    ]


@pytest.mark.parametrize(("age_s", "is_left"), [(23.9 * 3600, True), (24.1 * 3600, False)])
def test_memory_is_stale_after_a_day(root: pathlib.Path, age_s: float, is_left: bool) -> None:
    silent = _open(root, "silent")
    silent.close()
    then = silent.directory.stat().st_mtime - age_s
    os.utime(silent.directory, (then, then))
    _open(root)
    assert silent.directory.exists() == is_left


def test_a_run_that_was_begun_again_leaves_its_first_memory_to_be_swept(root: pathlib.Path) -> None:
    first = _open(root)
    first.close()
    (root.parent / "run" / "token").write_text("another")
    _open(root, "other")
    assert not first.directory.exists()


def test_two_processes_may_hold_a_memory_and_it_stays_until_both_let_go(root: pathlib.Path) -> None:
    one, two = _open(root), _open(root)
    (root.parent / "run" / "token").unlink()
    for place in (one, two):
        _open(root, "other")
        assert place.directory.exists()
        place.close()
    _open(root, "other")
    assert not one.directory.exists()


def test_a_root_that_is_missing_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent/paceline-.*No such file or directory"):
        MemoryStorage(tmp_path / "absent", "token", "0")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/token: File exists"):
        run_token(tmp_path / "file" / "token")


def test_ranks_that_hold_a_file_share_the_sending() -> None:
    replicas = ReplicaMap(rank=2, by_file={"a": [0, 2], "b": [1]})
    assert [replicas.sender("a", to) for to in range(4)] == [0, 2, 0, 2]
    assert [replicas.sender("b", to) for to in range(3)] == [1, 1, 1]
    assert replicas.has("a")
    assert not replicas.has("b")


@dataclasses.dataclass
class _Sent:
    to: int
    content: list[int]
    num_waits: int = 0

    def wait(self) -> None:
        self.num_waits += 1


def test_messages_are_of_bounded_size_in_order_and_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[_Sent] = []
    received: list[_Sent] = []

    def isend(part: torch.Tensor, *, group: object, group_dst: int) -> _Sent:
        sent.append(_Sent(group_dst, part.tolist()))
        return sent[-1]

    def irecv(part: torch.Tensor, *, group: object, group_src: int) -> _Sent:
        part.fill_(7)
        received.append(_Sent(group_src, part.tolist()))
        return received[-1]

    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(dist, "irecv", irecv)
    monkeypatch.setattr("paceline.checkpoint.memory_storage._MESSAGE_BYTES", 4)
    messages = Messages(None)  # type: ignore[arg-type]
    room = torch.zeros(5, dtype=torch.uint8)
    messages.send(torch.arange(10, dtype=torch.uint8), 3)
    messages.receive(room, 1)
    assert [(one.to, one.content) for one in sent] == [
        (3, [0, 1, 2, 3]),
        (3, [4, 5, 6, 7]),
        (3, [8, 9]),
    ]
    assert [(one.to, len(one.content)) for one in received] == [(1, 4), (1, 1)]
    assert room.tolist() == [7] * 5
    assert {one.num_waits for one in sent + received} == {0}
    messages.wait()
    messages.send(torch.arange(2, dtype=torch.uint8), 0)
    messages.wait()
    messages.wait()
    assert {one.num_waits for one in sent + received} == {1}
    assert len(sent) == 4
