"""Tests that faults are scheduled by their seed, and affect their targets and nothing else."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from paceline.cli.lab import ChaosCommand
from paceline.core import UsageError
from paceline.lab import faults
from paceline.lab.faults import FAULTS, Fault, Kind, TargetRun, damage_newest, schedule
from paceline.lab.network import Site
from paceline.lab.run import MARK, SITE, end_all, marked_processes, new_mark, ranks_of, send

KINDS: dict[str, Kind] = {"kill": Kind(every_s=30.0), "stop": Kind(every_s=20.0, lasts_s=5.0)}
TREE = "import subprocess, sys; subprocess.run(['sleep', '60'])"


def test_a_seed_is_a_schedule() -> None:
    first = list(schedule(KINDS, seed=1, for_s=600))
    assert first == list(schedule(KINDS, seed=1, for_s=600))
    assert first != list(schedule(KINDS, seed=2, for_s=600))


def test_faults_are_in_time_and_about_as_many_as_asked_for() -> None:
    faults = list(schedule(KINDS, seed=3, for_s=6_000))
    assert [fault.number for fault in faults] == list(range(1, len(faults) + 1))
    times = [fault.due_s for fault in faults]
    assert times == sorted(times)
    assert max(times) < 6_000
    kills = [fault for fault in faults if fault.kind == "kill"]
    assert len(kills) == pytest.approx(200, rel=0.1)
    assert len(faults) - len(kills) == pytest.approx(300, rel=0.1)
    assert all(fault.lasts_s == KINDS[fault.kind].lasts_s for fault in faults)
    assert all(0 <= fault.choice < 1 for fault in faults)


def test_leaving_a_kind_out_does_not_move_the_others() -> None:
    both = [each.due_s for each in schedule(KINDS, seed=4, for_s=300) if each.kind == "kill"]
    alone = [each.due_s for each in schedule({"kill": KINDS["kill"]}, seed=4, for_s=300)]
    assert both == alone


@pytest.fixture
def mark() -> str:
    return new_mark()


def _started(mark: str, **variables: str) -> "subprocess.Popen[bytes]":
    before = len(marked_processes(mark))
    environment = {**os.environ, MARK: mark, **variables}
    process = subprocess.Popen([sys.executable, "-c", TREE], env=environment)
    deadline = time.monotonic() + 20
    while len(marked_processes(mark)) < before + 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    return process


def test_a_tree_is_found_and_its_leaf_is_the_rank(mark: str) -> None:
    process = _started(mark)
    try:
        assert process.pid in marked_processes(mark)
        (rank,) = ranks_of(mark)
        assert rank != process.pid
        assert send(rank, signal.SIGKILL, mark)
        process.wait(20)
        assert marked_processes(mark) == []
    finally:
        process.kill()
        process.wait()


def test_what_outlives_its_parent_is_found_and_ended(mark: str) -> None:
    process = _started(mark)
    (rank,) = ranks_of(mark)
    process.kill()
    process.wait()
    assert end_all(mark, 0.2) == [rank]
    deadline = time.monotonic() + 10
    while marked_processes(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert marked_processes(mark) == []


def _becomes(pid: int, *, stopped: bool) -> bool:
    """Waits for a process to be stopped or to run: the kernel delivers signals with a delay."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
        if (stat.rpartition(")")[2].split()[0] == "T") == stopped:
            return True
        time.sleep(0.02)
    return False


def test_a_stopped_rank_continues_when_the_fault_ends(mark: str, tmp_path: pathlib.Path) -> None:
    process = _started(mark)
    try:
        (rank,) = ranks_of(mark)
        run = TargetRun(directory=tmp_path, mark=mark, sites=(), any_process=False)
        fault = Fault(number=1, kind="stop", due_s=0.0, lasts_s=1.0, choice=0.5)
        with FAULTS["stop"].inject(run, fault) as target:
            assert target == "process 1 of 1"
            assert _becomes(rank, stopped=True)
        assert _becomes(rank, stopped=False)
    finally:
        end_all(mark, 0.0)
        process.wait()


@pytest.mark.parametrize(("any_process", "num_killed"), [(False, 2), (True, 4)])
def test_a_site_is_killed_and_the_other_is_not(
    mark: str, tmp_path: pathlib.Path, any_process: bool, num_killed: int
) -> None:
    trees = [_started(mark, **{SITE: site}) for site in ("0", "1", "1")]
    sites = [Site(index=index, hosts=(), switch=()) for index in range(2)]
    run = TargetRun(directory=tmp_path, mark=mark, sites=sites, any_process=any_process)
    spared = marked_processes(mark, site=0)
    try:
        fault = Fault(number=1, kind="site-kill", due_s=0.0, lasts_s=0.0, choice=0.5)
        with FAULTS["site-kill"].inject(run, fault) as target:
            assert target == f"site 1, {num_killed} processes"
        for tree in trees[1:]:
            tree.wait(20)
        assert marked_processes(mark) == spared
        assert len(spared) == 2
        with FAULTS["site-kill"].inject(run, fault) as target:
            assert target is None
    finally:
        end_all(mark, 0.0)
        for tree in trees:
            tree.wait()


def test_a_fault_without_a_target_is_not_injected(mark: str, tmp_path: pathlib.Path) -> None:
    run = TargetRun(directory=tmp_path, mark=mark, sites=(), any_process=True)
    for kind in ("kill", "stop", "corrupt"):
        fault = Fault(number=1, kind=kind, due_s=0.0, lasts_s=0.0, choice=0.5)
        with FAULTS[kind].inject(run, fault) as target:
            assert target is None


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_can_be_asked_for(name: str, tmp_path: pathlib.Path) -> None:
    option = "kill_every" if name == "kill" else name.replace("-", "_")
    asked = True if isinstance(getattr(ChaosCommand, option), bool) else "7s"
    command = ChaosCommand(
        command=("true",),
        directory=tmp_path,
        hosts=2,
        sites=2,
        **{option: asked},  # type: ignore[arg-type]
    )
    ((kind, settings),) = command._config().kinds.items()
    assert kind == name
    expected_s = {"kill": 0.0, "site-kill": 0.0, "disk-full": 5.0, "corrupt": 0.0}.get(name, 7.0)
    assert settings.lasts_s == expected_s
    assert settings.every_s == (7.0 if name == "kill" else 30.0)


def test_others_are_not_touched(mark: str) -> None:
    other = subprocess.Popen(["sleep", "60"])
    try:
        assert not send(other.pid, signal.SIGKILL, mark)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def _checkpoints(run: pathlib.Path, *steps: int) -> None:
    for step in steps:
        folder = run / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        for name in ("manifest.json", "rank-0.bin"):
            (folder / name).write_bytes(bytes(range(200)))


def _content(run: pathlib.Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize("choice", [0.1, 0.2, 0.3, 0.4, 0.5])
def test_one_file_of_the_newest_checkpoint_is_damaged(
    tmp_path: pathlib.Path, choice: float
) -> None:
    _checkpoints(tmp_path, 5, 10, 15)
    before = _content(tmp_path)
    said = damage_newest(tmp_path, choice)
    assert said is not None
    (changed,) = [path for path, content in _content(tmp_path).items() if content != before[path]]
    assert "step-00000015" in changed
    assert said.partition(" cut")[0].partition(",")[0] in changed


def test_the_only_checkpoint_is_left_alone(tmp_path: pathlib.Path) -> None:
    _checkpoints(tmp_path, 5)
    before = _content(tmp_path)
    assert damage_newest(tmp_path, 0.5) is None
    assert _content(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_is_filled_freed_and_kept(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    with faults.small_disk(run, 2 * 1024 * 1024):
        (run / "before").write_bytes(b"x" * 1000)
        assert faults.fill(run) > 1_000_000
        with pytest.raises(OSError, match="No space"):
            (run / "more").write_bytes(b"x" * 100_000)
        faults.free(run)
        (run / "more").write_bytes(b"x" * 100_000)
    assert not run.is_mount()
    assert sorted(path.name for path in run.iterdir()) == ["before", "more"]
    assert (run / "more").stat().st_size == 100_000


def test_a_disk_needs_an_empty_place(tmp_path: pathlib.Path) -> None:
    (tmp_path / "old").touch()
    with pytest.raises(UsageError, match="not empty"), faults.small_disk(tmp_path, 1_000_000):
        pass
