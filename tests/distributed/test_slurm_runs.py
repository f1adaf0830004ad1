"""Effects of TERM, USR1, requeue, scancel and a lost node on runs under Slurm."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from paceline.lab.slurm import missing_packages, start_slurm, stop_slurm
from paceline.training.config import RunConfig
from paceline.training.run_directory import audit_run
from paceline.training.toml_config import encode_config
from tests.distributed.slurm_cluster import lose_node, slurm_client
from tests.distributed.small_runs import changed, small_run
from tests.processes import until

pytestmark = [
    pytest.mark.host("how Slurm starts ranks"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        bool(missing_packages()), reason=f"not installed: {' '.join(missing_packages())}"
    ),
]

PACELINE = str(pathlib.Path(sys.executable).parent / "paceline")
_SECTIONS = {"training": {"steps": 100_000}, "checkpoint": {"every_steps": 99_999}}


@pytest.fixture
def slurm(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    directory = tmp_path / "slurm"
    status = start_slurm(directory, num_nodes=2, cpus_per_node=2, gpus_per_node=0)
    monkeypatch.setenv("SLURM_CONF", status.configuration)
    yield directory
    stop_slurm(directory)


class Job:
    """A job that trains on both CPUs of a node and writes the exit code of each attempt."""

    def __init__(self, place: pathlib.Path, out: str, *options: str, then: str = "") -> None:
        self.config: RunConfig = changed(small_run(place), out, **_SECTIONS)
        self.out = pathlib.Path(self.config.out)
        self._codes = place / f"{out}-codes"
        (place / f"{out}.toml").write_text(encode_config(self.config))
        self._script = place / f"{out}.sh"
        self._script.write_text(
            # A job of the same number on another cluster of this machine would have the same port.
            f"#!/bin/bash\nexport MASTER_PORT={_free_port()}\n"
            f"srun --ntasks 2 {PACELINE} train {place / out}.toml $CHANGES\n"
            f"code=$?; echo $code >> {self._codes}\n{then}\nexit $code\n"
        )
        self._options = ("--nodes=1", "--ntasks=2", f"--output={place / out}-%j.log", *options)
        self.id = ""

    def submit(self, **variables: str) -> None:
        command = ["sbatch", "--parsable", *self._options, str(self._script)]
        result = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | variables, check=True
        )
        self.id = result.stdout.strip()

    def codes(self) -> list[int]:
        with contextlib.suppress(FileNotFoundError):
            return [int(code) for code in self._codes.read_text().split()]
        return []

    def state(self) -> str:
        return slurm_client(
            "squeue", "--noheader", "--states=all", f"--job={self.id}", "--format=%T"
        )

    def rows(self) -> list[dict[str, object]]:
        with contextlib.suppress(FileNotFoundError, ValueError):
            lines = (self.out / "metrics.jsonl").read_text().splitlines()
            return [json.loads(line) for line in lines]
        return []

    def last_step(self) -> int:
        return max((int(str(row["step"])) for row in self.rows()), default=0)

    def starts(self) -> list[str]:
        return [str(row["message"]) for row in self.rows() if row.get("name") == "started"]

    def saved_step(self) -> int:
        saved = sorted((self.out / "checkpoints").glob("step-*"))
        return int(saved[-1].name.removeprefix("step-")) if saved else 0

    def finish(self) -> None:
        """Trains a few more steps and requires that every sample was used once."""
        steps = self.saved_step() + 5
        self.submit(CHANGES=f"--set training.steps={steps}")
        until(lambda: self.state() in ("COMPLETED", ""))
        assert self.codes()[-1] == 0
        assert audit_run(self.out) == (steps, [])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def test_term_saves_and_the_job_ends_with_143(slurm: pathlib.Path, tmp_path: pathlib.Path) -> None:
    job = Job(tmp_path, "term")
    job.submit()
    until(lambda: job.last_step() >= 3)
    slurm_client("scancel", "--signal=TERM", job.id)
    until(job.codes)
    assert job.codes() == [143]
    assert job.saved_step() == job.last_step() >= 3
    job.finish()


# Slurm delays a requeued job by two minutes.
def test_a_warning_before_the_time_limit_saves_and_requeues(
    slurm: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    requeue = "[ $code = 143 ] && scontrol requeue $SLURM_JOB_ID"
    job = Job(tmp_path, "usr1", "--time=2", "--signal=USR1@60", "--requeue", then=requeue)
    job.submit()
    until(lambda: len(job.starts()) == 2, 500)
    # On a busy machine an attempt may be warned before it starts training; then there is one more.
    assert set(job.codes()) == {143}
    step = job.saved_step()
    assert job.starts()[1] == f"from step {step}, 2 ranks on cpu"
    slurm_client("scancel", job.id)


def test_a_requeued_job_goes_on(slurm: pathlib.Path, tmp_path: pathlib.Path) -> None:
    job = Job(tmp_path, "requeue", "--requeue")
    job.submit()
    until(lambda: job.last_step() >= 3)
    slurm_client("scontrol", "requeue", job.id)
    until(lambda: len(job.starts()) == 2, 300)
    step = job.saved_step()
    assert step >= 3
    assert job.starts()[1] == f"from step {step}, 2 ranks on cpu"
    slurm_client("scancel", job.id)


def test_a_cancelled_job_has_saved(slurm: pathlib.Path, tmp_path: pathlib.Path) -> None:
    job = Job(tmp_path, "cancelled")
    job.submit()
    until(lambda: job.last_step() >= 3)
    slurm_client("scancel", job.id)
    until(lambda: job.state() not in ("RUNNING", "COMPLETING"))
    assert job.saved_step() == job.last_step() >= 3
    assert job.rows()[-1]["name"] == "stopped"
    job.finish()


def test_a_job_of_a_node_that_is_lost_goes_on_elsewhere(
    slurm: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    sections = {"checkpoint": {"every_steps": 5}, "training": {"steps": 200}}
    job = Job(tmp_path, "lost", "--requeue")
    job.config = changed(job.config, "lost", **sections)
    (tmp_path / "lost.toml").write_text(encode_config(job.config))
    job.submit()
    until(lambda: job.last_step() >= 12)
    node = slurm_client("squeue", "--noheader", f"--job={job.id}", "--format=%N")
    lose_node(slurm, node, job.id)
    slurm_client("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")
    until(lambda: job.codes() or job.state() in ("COMPLETED", "FAILED"), 300)
    assert job.codes() == [0]
    assert len(job.starts()) == 2
    assert audit_run(job.out) == (200, [])
