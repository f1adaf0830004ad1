"""One owner per directory, whatever happens to it."""

import json
import multiprocessing
import os
import pathlib
import signal
import stat
import subprocess
import sys
import time

import pytest

from paceline.core import lock
from paceline.core.errors import UsageError
from paceline.core.lock import INHERITED, LOCK, InUseError, held_locks, owned
from paceline.core.processes import start_child

_OWN = """
import sys, time
from paceline.core.lock import owned
with owned(sys.argv[1], "paceline train"):
    print("owned", flush=True)
    sys.stdin.read()
"""
_TRY = """
import sys
from paceline.core.lock import InUseError, owned
try:
    with owned(sys.argv[1], "paceline train"):
        print("owned", flush=True)
except InUseError as error:
    print(error, flush=True)
"""


def _start(program: str, directory: pathlib.Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _try(directory: pathlib.Path) -> str:
    with _start(_TRY, directory) as process:
        return _said(process)


def _owner_of_another_kernel(beat: int = 0) -> bytes:
    fields = {"command": "paceline train", "pid": 7, "host": "node-2", "since": "2026-01-01 00:00"}
    return json.dumps(fields | {"kernel": "another", "token": "a", "beat": beat}).encode()


def test_a_second_command_is_told_who_owns_the_directory(tmp_path: pathlib.Path) -> None:
    with _start(_OWN, tmp_path) as first:
        assert _said(first) == "owned"
        refusal = _try(tmp_path)
        assert refusal.startswith(f"{tmp_path} is in use (paceline train, process {first.pid} on ")
        assert refusal.endswith("; wait until it ends, or stop it")
        assert InUseError.exit_code == 2


def test_a_directory_is_free_when_its_owner_has_ended(tmp_path: pathlib.Path) -> None:
    with _start(_OWN, tmp_path) as first:
        assert _said(first) == "owned"
    assert _try(tmp_path) == "owned"


def test_the_directory_of_a_killed_owner_is_free_at_once(tmp_path: pathlib.Path) -> None:
    with _start(_OWN, tmp_path) as first:
        assert _said(first) == "owned"
        first.kill()
        first.wait()
    began = time.monotonic()
    with owned(tmp_path, "paceline train"):
        assert time.monotonic() - began < 0.5


def test_a_stopped_owner_still_owns(tmp_path: pathlib.Path) -> None:
    with _start(_OWN, tmp_path) as first:
        assert _said(first) == "owned"
        first.send_signal(signal.SIGSTOP)
        assert "is in use" in _try(tmp_path)
        first.send_signal(signal.SIGCONT)


def test_a_process_that_owns_a_directory_owns_it_again(tmp_path: pathlib.Path) -> None:
    with owned(tmp_path, "paceline loop"):
        with owned(tmp_path, "paceline sweep"):
            pass
        assert "is in use (paceline loop, " in _try(tmp_path)
    assert _try(tmp_path) == "owned"
    assert held_locks() == []


def test_a_child_owns_what_its_parent_owns(tmp_path: pathlib.Path) -> None:
    with owned(tmp_path, "paceline sweep"):
        child = start_child([sys.executable, "-c", _TRY, str(tmp_path)], stdout=subprocess.PIPE)
        assert child.communicate()[0] == b"owned\n"


def test_a_child_that_inherited_nothing_owns_nothing(tmp_path: pathlib.Path) -> None:
    """The numbers in the environment mean other files, or none."""
    with owned(tmp_path, "paceline sweep"):
        environment = os.environ | {INHERITED: "0,1,2,99,-1,x"}
        command = [sys.executable, "-c", _TRY, str(tmp_path)]
        child = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert "is in use" in child.stdout


def test_a_directory_is_free_only_when_the_children_of_a_killed_owner_have_ended(
    tmp_path: pathlib.Path,
) -> None:
    """A child, which may still write, dies a moment after its parent."""
    program = """
import os, sys, time
from paceline.core.lock import owned
with owned(sys.argv[1], "paceline train"):
    if os.fork() == 0:
        time.sleep(1.5)
        open(os.path.join(sys.argv[1], "written"), "w").close()
        os._exit(0)
    print("owned", flush=True)
    time.sleep(60)
"""
    with _start(program, tmp_path) as first:
        assert _said(first) == "owned"
        first.kill()
        first.wait()
        with owned(tmp_path, "paceline train"):
            assert (tmp_path / "written").exists()


def test_an_owner_that_has_ended_frees_the_directory_for_children_too(
    tmp_path: pathlib.Path,
) -> None:
    with owned(tmp_path, "paceline sweep"):
        child = start_child(["sleep", "30"])
    try:
        assert _try(tmp_path) == "owned"
    finally:
        child.kill()
        child.wait()


def test_a_forked_child_does_not_end_the_ownership(tmp_path: pathlib.Path) -> None:
    context = owned(tmp_path, "paceline train")
    with context:
        child = os.fork()
        if child == 0:
            context.__exit__(None, None, None)
            os._exit(0)
        os.waitpid(child, 0)
        assert "is in use (paceline train, " in _try(tmp_path)


def test_one_of_many_that_start_together_owns(tmp_path: pathlib.Path) -> None:
    started = [_start(_OWN_OR_SAY, tmp_path) for _ in range(6)]
    said = [_said(process) for process in started]
    for process in started:
        process.communicate("")
    assert sorted(said)[:1] + sorted(said)[-1:] != ["owned", "owned"]
    assert said.count("owned") == 1


_OWN_OR_SAY = """
import sys
from paceline.core.lock import InUseError, owned
try:
    with owned(sys.argv[1], "paceline train"):
        print("owned", flush=True)
        sys.stdin.read()
except InUseError as error:
    print(error, flush=True)
    sys.stdin.read()
"""


def test_a_command_can_wait_for_another_to_end(tmp_path: pathlib.Path) -> None:
    with _start(_OWN, tmp_path) as first:
        assert _said(first) == "owned"
        with pytest.raises(InUseError), owned(tmp_path, "a run", longest_wait_s=0.1):
            pass
        waiting = multiprocessing.get_context("spawn").Process(target=_wait, args=(tmp_path,))
        waiting.start()
        time.sleep(0.5)
        assert waiting.is_alive()
        first.communicate("")
        waiting.join(30)
        assert waiting.exitcode == 0


def _wait(directory: pathlib.Path) -> None:
    with owned(directory, "a run", longest_wait_s=60.0):
        pass


def test_other_users_cannot_lock_the_file(tmp_path: pathlib.Path) -> None:
    """Whoever can open a file can lock it, and would keep its owner out."""
    with owned(tmp_path / "own", "paceline train"):
        assert stat.S_IMODE((tmp_path / "own" / LOCK).stat().st_mode) == 0o600
    (tmp_path / "group").mkdir()
    (tmp_path / "group").chmod(0o770)
    previous = os.umask(0)
    try:
        with owned(tmp_path / "group", "paceline train"):
            assert stat.S_IMODE((tmp_path / "group" / LOCK).stat().st_mode) == 0o660
    finally:
        os.umask(previous)


def test_a_symbolic_link_is_not_followed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / LOCK).symlink_to(tmp_path / "victim")
    with pytest.raises(UsageError, match="cannot be written to"), owned(tmp_path, "x"):
        pass
    assert (tmp_path / "victim").read_text() == "kept"


def test_a_file_is_no_directory(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="is a file; name a directory"), owned(path, "x"):
            pass


_STRANGE = json.loads(_owner_of_another_kernel()) | {"pid": "x"}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff", b"{}", b"[" * 5000, json.dumps(_STRANGE).encode()],
)
def test_a_damaged_lock_file_keeps_nobody_out(tmp_path: pathlib.Path, content: bytes) -> None:
    (tmp_path / LOCK).write_bytes(content)
    with owned(tmp_path, "paceline train"):
        pass


def test_a_copied_directory_is_free(tmp_path: pathlib.Path) -> None:
    """On a file system of this host, the lock decides, whatever the file says."""
    (tmp_path / LOCK).write_bytes(_owner_of_another_kernel())
    with owned(tmp_path, "paceline train"):
        pass


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that other hosts may share, with short leases."""
    monkeypatch.setattr(lock, "_is_local", lambda directory: False)
    monkeypatch.setattr(lock, "BEAT_S", 0.1)
    monkeypatch.setattr(lock, "LEASE_S", 1.0)
    monkeypatch.setattr(lock, "_CLAIM_S", 0.2)


def test_a_host_whose_file_changes_owns_the_directory(shared: None, tmp_path: pathlib.Path) -> None:
    beats = multiprocessing.get_context("fork").Process(target=_beat, args=(tmp_path / LOCK,))
    (tmp_path / LOCK).write_bytes(_owner_of_another_kernel())
    beats.start()
    with pytest.raises(InUseError, match="process 7 on node-2"), owned(tmp_path, "x"):
        pass
    beats.kill()
    beats.join()


def _beat(path: pathlib.Path) -> None:
    for beat in range(200):
        path.write_bytes(_owner_of_another_kernel(beat))
        time.sleep(0.1)


def test_a_host_whose_file_does_not_change_has_ended(shared: None, tmp_path: pathlib.Path) -> None:
    (tmp_path / LOCK).write_bytes(_owner_of_another_kernel())
    began = time.monotonic()
    with owned(tmp_path, "paceline train"):
        assert time.monotonic() - began > 1.0


def test_the_owner_of_a_shared_directory_changes_its_file(
    shared: None, tmp_path: pathlib.Path
) -> None:
    with owned(tmp_path, "paceline train"):
        seen = {(tmp_path / LOCK).read_bytes() for _ in range(8) if not time.sleep(0.1)}
        assert len(seen) > 3
    assert (tmp_path / LOCK).read_bytes() == b""


def test_an_owner_that_another_host_has_replaced_ends(shared: None, tmp_path: pathlib.Path) -> None:
    owner = multiprocessing.get_context("fork").Process(target=_own_for_long, args=(tmp_path,))
    owner.start()
    while not (tmp_path / LOCK).exists() or not (tmp_path / LOCK).read_bytes():
        time.sleep(0.05)
    time.sleep(0.5)
    (tmp_path / LOCK).write_bytes(_owner_of_another_kernel())
    owner.join(10)
    assert owner.exitcode == 2


def _own_for_long(directory: pathlib.Path) -> None:
    with owned(directory, "paceline train"):
        time.sleep(30)


def test_without_locks_a_living_owner_is_noticed_and_a_dead_one_is_not(
    shared: None,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(lock, "_lock", lambda descriptor: None)
    owner = multiprocessing.get_context("fork").Process(target=_own_for_long, args=(tmp_path,))
    owner.start()
    time.sleep(1.0)
    with pytest.raises(InUseError, match=f"process {owner.pid} on "), owned(tmp_path, "x"):
        pass
    owner.kill()
    owner.join()
    with owned(tmp_path, "x"):
        pass
    assert "this file system has no locks" in capsys.readouterr().err


def test_temporary_directories_and_disks_are_of_this_host() -> None:
    assert lock._is_local(pathlib.Path("/dev/shm"))
    assert not lock._is_local(pathlib.Path("/proc"))
