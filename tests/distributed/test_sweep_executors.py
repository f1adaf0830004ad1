"""Executors of a sweep's runs (local processes, Slurm, Ray), and the loss of their workers."""

import contextlib
import json
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline.core.errors import UsageError
from paceline.lab.slurm import missing_packages, start_slurm, stop_slurm
from paceline.loop.executors import Executor, LocalExecutor, RunTask, has_ended
from paceline.training.run_directory import audit_run
from paceline.training.toml_config import encode_config
from tests.distributed.slurm_cluster import lose_node, slurm_client
from tests.distributed.small_runs import changed, small_run
from tests.processes import children_of, until

pytestmark = pytest.mark.host("how runs of a sweep are started")

_STEPS = 150


def _tasks(place: pathlib.Path, number: int, steps: int = 3) -> list[RunTask]:
    base = small_run(place)
    tasks = []
    for index in range(number):
        name = f"run-{index}"
        config = changed(
            base,
            name,
            training={"steps": steps, "seed": index},
            checkpoint={"every_steps": 5},
            evaluation={"sequences": 4, "every_steps": steps},
        )
        directory = pathlib.Path(config.out)
        directory.mkdir()
        path = directory / "run.toml"
        path.write_text(encode_config(config))
        tasks.append(
            RunTask(label=name, directory=str(directory), config=str(path), ranks=1, threads=1)
        )
    return tasks


def _result(task: RunTask) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((pathlib.Path(task.directory) / "ended.json").read_text())
    return result


def _last_step(task: RunTask) -> int:
    path = pathlib.Path(task.directory) / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line).get("step", 0) for line in lines if line.endswith("}")), default=0)


def _run_to_the_end(executor: Callable[[], Executor], tasks: list[RunTask]) -> None:
    """Restarts unfinished runs, as a sweep does, and requires that all succeed."""
    for _ in range(3):
        missing = [task for task in tasks if not has_ended(task)]
        if missing:
            list(executor().run(missing))
    for task in tasks:
        assert _result(task)["outcome"] == "ok", task
        assert audit_run(pathlib.Path(task.directory)) == (_STEPS, [])


def test_runs_end_well_badly_or_not_at_all(tmp_path: pathlib.Path) -> None:
    good, bad, killed = _tasks(tmp_path, 3)
    config = pathlib.Path(bad.config)
    config.write_text(config.read_text().replace("learning_rate = 0.01", "learning_rate = -1.0"))
    path = pathlib.Path(killed.config)
    path.write_text(path.read_text().replace("steps = 3\n", "steps = 100000\n", 1))
    me = os.getpid()

    def kill() -> None:
        until(lambda: _last_step(killed) >= 3)
        for pid in children_of(me):
            with contextlib.suppress(FileNotFoundError):  # Other processes may end.
                if killed.config in pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                    os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    ended = list(LocalExecutor(2).run([good, bad, killed]))
    killer.join()
    assert sorted(ended) == [good.label, bad.label]
    assert _result(good)["outcome"] == "ok"
    assert _result(bad)["outcome"] == "failed"
    assert "learning_rate -1.0 must be positive" in _result(bad)["reason"]
    assert not has_ended(killed)


@pytest.mark.slow
def test_a_sweep_that_stops_lets_its_runs_save(tmp_path: pathlib.Path) -> None:
    tasks = _tasks(tmp_path, 2, steps=100_000)

    class StopError(Exception):
        pass

    def interrupt(_signal: int, _frame: object) -> None:
        raise StopError

    previous = signal.signal(signal.SIGALRM, interrupt)
    me = os.getpid()

    def alarm() -> None:
        until(lambda: all(_last_step(task) >= 3 for task in tasks))
        os.kill(me, signal.SIGALRM)

    watcher = threading.Thread(target=alarm)
    watcher.start()
    try:
        with pytest.raises(StopError):
            list(LocalExecutor(2).run(tasks))
    finally:
        signal.signal(signal.SIGALRM, previous)
        watcher.join()
    for task in tasks:
        assert not has_ended(task)
        saved = sorted((pathlib.Path(task.directory) / "checkpoints").glob("step-*"))
        assert int(saved[-1].name.removeprefix("step-")) == _last_step(task)


@pytest.fixture
def slurm(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    if missing_packages():
        pytest.skip(f"not installed: {' '.join(missing_packages())}")
    pytest.importorskip("submitit")
    directory = tmp_path / "slurm"
    status = start_slurm(directory, num_nodes=2, cpus_per_node=1, gpus_per_node=0)
    monkeypatch.setenv("SLURM_CONF", status.configuration)
    yield directory
    stop_slurm(directory)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_slurm_goes_on_without_a_node(slurm: pathlib.Path, tmp_path: pathlib.Path) -> None:
    from paceline.loop.executors import SlurmExecutor

    tasks = _tasks(tmp_path, 4, _STEPS)

    def lose() -> None:
        until(lambda: all(_last_step(task) >= 12 for task in tasks[:2]), 300)
        job, node = slurm_client(
            "squeue", "--noheader", "--array", "--states=running", "--format=%A %N"
        ).split()[:2]
        lose_node(slurm, node, job)
        slurm_client("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    thread = threading.Thread(target=lose)
    thread.start()
    _run_to_the_end(lambda: SlurmExecutor(tmp_path, None, None, 30), tasks)
    thread.join()
    starts = [
        sum('"started"' in line for line in (pathlib.Path(task.directory) / "metrics.jsonl").open())
        for task in tasks
    ]
    assert sorted(starts) == [1, 1, 1, 2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_starts_the_run_of_a_killed_worker_again(tmp_path: pathlib.Path) -> None:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    from paceline.loop.executors import RayExecutor

    tasks = _tasks(tmp_path, 3, _STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(each for each in sys.path if each))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster()
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=1, include_dashboard=False, object_store_memory=10**8)
            cluster.wait_for_nodes()

            def kill() -> None:
                until(lambda: _last_step(tasks[0]) >= 12, 300)
                for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
                    try:
                        command = path.read_text().split("\0")
                        parent = int(
                            (path.parent / "stat").read_text().rpartition(")")[2].split()[1]
                        )
                    except (OSError, UnicodeDecodeError):
                        continue
                    if tasks[0].config in command:
                        os.kill(parent, signal.SIGKILL)  # Ray's worker.
                        return

            killer = threading.Thread(target=kill)
            killer.start()
            _run_to_the_end(lambda: RayExecutor(cluster.address, None), tasks)
            killer.join()
        finally:
            ray.shutdown()
            cluster.shutdown()


def test_missing_packages_name_their_extra(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.loop.executors import SlurmExecutor

    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UsageError, match=r"paceline\[slurm\]"):
        SlurmExecutor(tmp_path, None, None, 30)
