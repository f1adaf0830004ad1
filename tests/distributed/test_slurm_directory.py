"""The directory of a local Slurm is this user's alone; nothing of others is read or deleted."""

import os
import pathlib
import shutil
import stat
import subprocess
import sys

import pytest

from paceline.lab.slurm import (
    SlurmError,
    default_directory,
    missing_packages,
    slurm_status,
    start_slurm,
    stop_slurm,
)

pytestmark = pytest.mark.host("how Slurm is started")

_OTHER = 65534


@pytest.fixture
def shared(tmp_path: pathlib.Path) -> pathlib.Path:
    """Returns a directory in which every user may create files, as in the temporary one."""
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.geteuid() and not parent.stat().st_mode & stat.S_IXOTH:
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o1777)
    return place


def _as_other(script: str, place: pathlib.Path) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv")
    user = [f"--reuid={_OTHER}", f"--regid={_OTHER}", "--clear-groups"]
    subprocess.run(["setpriv", *user, "sh", "-c", script], check=True, cwd=place)


def _slurm(place: pathlib.Path, action: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """Runs a command on a cluster in place/slurm; programs of Slurm leave a trace when they run."""
    programs = place.parent / "programs"
    programs.mkdir(exist_ok=True)
    for name in ("sinfo", "scancel", "squeue"):
        (programs / name).write_text(f'#!/bin/sh\necho "$SLURM_CONF" >> {programs}/ran\n')
        (programs / name).chmod(0o755)
    command = [sys.executable, "-m", "paceline", "lab", "slurm", action]
    return subprocess.run(
        [*command, "--directory", str(place / "slurm")],
        env=os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"} | more,
        capture_output=True,
        text=True,
        timeout=120,
    )


_TRAP = """
mkdir -p slurm/run
echo PluginDir=slurm > slurm/slurm.conf
touch slurm/.paceline-slurm
(exec -a "$PWD/slurm" sleep 60 >/dev/null 2>&1) &
echo $! > slurm/run/slurmctld.pid
"""


@pytest.mark.parametrize("action", ["status", "start", "stop"])
def test_the_directory_of_another_user_is_refused_before_anything_in_it_is_read(
    shared: pathlib.Path, action: str
) -> None:
    _as_other(_TRAP, shared)
    result = _slurm(shared, action)
    assert result.returncode == 1
    if action != "start" or not missing_packages():
        assert f"{shared}/slurm belongs to another user" in result.stderr
    assert not (shared.parent / "programs" / "ran").exists()


@pytest.mark.parametrize("action", ["status", "start", "stop"])
def test_a_link_to_a_directory_of_ours_is_refused_and_nothing_behind_it_is_lost(
    shared: pathlib.Path, tmp_path: pathlib.Path, action: str
) -> None:
    victim = tmp_path / "victim"
    (victim / "state").mkdir(parents=True)
    (victim / "state" / "thesis.txt").write_text("precious")
    victim.chmod(0o755)
    _as_other(f"ln -s {victim} slurm", shared)
    result = _slurm(shared, action)
    assert result.returncode == 1
    if action != "start" or not missing_packages():
        assert f"{shared}/slurm belongs to another user" in result.stderr
    assert (victim / "state" / "thesis.txt").read_text() == "precious"
    assert stat.S_IMODE(victim.stat().st_mode) == 0o755
    assert sorted(path.name for path in victim.iterdir()) == ["state"]


def test_our_own_link_and_our_own_directory_with_other_files_are_refused(
    tmp_path: pathlib.Path,
) -> None:
    if missing_packages():
        pytest.skip("needs Slurm")
    (tmp_path / "own" / "state").mkdir(parents=True)
    (tmp_path / "own" / "state" / "thesis.txt").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "own")
    numbers = {"num_nodes": 1, "cpus_per_node": 1, "gpus_per_node": 0}
    with pytest.raises(SlurmError, match="is a link or a file"):
        start_slurm(tmp_path / "link", **numbers)
    with pytest.raises(SlurmError, match="has other files; name a new or empty --directory"):
        start_slurm(tmp_path / "own", **numbers)
    assert (tmp_path / "own" / "state" / "thesis.txt").read_text() == "precious"


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / ".paceline-slurm").touch()
    (tmp_path / "slurm").chmod(0o777)
    for function in (slurm_status, stop_slurm):
        with pytest.raises(SlurmError, match="other users can write to"):
            function(tmp_path / "slurm")


def test_an_unknown_pid_file_is_left_alone(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "slurm" / "run"
    run.mkdir(parents=True)
    (tmp_path / "slurm" / ".paceline-slurm").touch()
    for name in ("other.pid", "slurmd-n1.pid", "munged.pid"):
        (run / name).write_text("not a number")
    stop_slurm(tmp_path / "slurm")
    assert [path.name for path in run.iterdir()] == ["other.pid"]


def test_by_default_the_directory_is_where_other_users_cannot_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_directory() == tmp_path / "paceline-slurm"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert default_directory() == tmp_path / "state" / "paceline-slurm"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_directory() == tmp_path / "home" / ".local" / "state" / "paceline-slurm"


def test_the_line_for_the_shell_survives_spaces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.cli.main import main
    from paceline.lab import slurm

    made = slurm.SlurmStatus(state="running", directory="x", configuration="/a b/$(id)/slurm.conf")
    monkeypatch.setattr(slurm, "start_slurm", lambda directory, **numbers: made)
    assert main(["lab", "slurm", "start", "--directory", str(tmp_path)]) == 0
    line = capsys.readouterr().out
    found = subprocess.run(["sh", "-c", f"{line} echo $SLURM_CONF"], capture_output=True, text=True)
    assert found.stdout == "/a b/$(id)/slurm.conf\n"
