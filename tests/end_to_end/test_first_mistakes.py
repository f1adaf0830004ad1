"""Tests that a new user's mistakes get one error line with the remedy."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

from paceline.records import RecordStore
from paceline.records.store import decode_record
from tests.processes import call_paceline
from tests.unit.record_factory import step_record

PACELINE = str(pathlib.Path(sys.executable).with_name("paceline"))


def _complaint(*arguments: str, cwd: pathlib.Path, exit_code: int, **variables: str) -> str:
    """Runs a command that fails, and returns its single error line."""
    result = subprocess.run(
        [PACELINE, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **variables},
    )
    return _error_line(result, exit_code)


def _error_line(result: "subprocess.CompletedProcess[str]", exit_code: int) -> str:
    assert result.returncode == exit_code, result.stderr
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("paceline: error: ")
    return line


def _without_torch(directory: pathlib.Path) -> str:
    """Returns a `PYTHONPATH` on which importing torch fails."""
    (directory / "torch").mkdir()
    code = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    (directory / "torch" / "__init__.py").write_text(code)
    return os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])


def test_no_torch(tmp_path: pathlib.Path) -> None:
    path = _without_torch(tmp_path)
    for verb in (["env"], ["bench", "step"], ["bench", "ddp"], ["calibrate"]):
        line = _complaint(*verb, cwd=tmp_path, exit_code=1, PYTHONPATH=path)
        assert "torch is not installed" in line
        assert "pip install torch" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "build", "--store", "store.jsonl", "--out", "taken"],
        ["report", "plot", "--store", "store.jsonl", "--out", "taken"],
        ["plan", "memory", "--model", "small", "--figure", "taken/picture.png"],
    ],
)
def test_a_place_that_cannot_be_written(tmp_path: pathlib.Path, arguments: list[str]) -> None:
    (tmp_path / "taken").write_text("a file, not a directory")
    RecordStore(tmp_path / "store.jsonl").append(step_record())
    line = _error_line(call_paceline(tmp_path, *arguments), exit_code=1)
    assert "taken" in line
    assert line.endswith("; name another path")


def test_planning_without_torch(tmp_path: pathlib.Path) -> None:
    path = _without_torch(tmp_path)
    result = subprocess.run(
        [PACELINE, "plan", "account"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert result.returncode == 0, result.stderr
    assert "3,276 GiB" in result.stdout


@pytest.mark.parametrize(
    "verb",
    [
        ["bench", "ddp"],
        ["bench", "memory"],
        ["profile", "step", "--out", "profile"],
        ["calibrate"],
        ["plan", "memory"],
    ],
)
def test_a_model_that_is_misspelt(tmp_path: pathlib.Path, verb: list[str]) -> None:
    line = _error_line(call_paceline(tmp_path, *verb, "--model", "bytes34M"), exit_code=2)
    assert "unknown model 'bytes34M'; did you mean 'bytes-34M'?" in line


def test_a_size_of_the_courses_that_is_misspelt() -> None:
    script = pathlib.Path(__file__).parents[2] / "course" / "benchmark_naive_ddp.py"
    result = subprocess.run(
        [sys.executable, script, "--size", "smal"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 2
    assert "invalid choice: 'smal'" in result.stderr.splitlines()[-1]


def test_a_port_that_is_taken(tmp_path: pathlib.Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = _complaint(
            *("bench", "comm", "--sizes", "1MB", "--device", "cpu"),
            cwd=tmp_path,
            exit_code=2,
            RANK="0",
            WORLD_SIZE="2",
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
    assert (
        f"127.0.0.1:{port}: another program listens there; set MASTER_PORT to a free port" in line
    )


def test_a_step_that_is_too_large_to_profile(tmp_path: pathlib.Path) -> None:
    line = _complaint(
        *("profile", "step", "--model", "llama3-405B", "--device", "cpu", "--out", "profile"),
        cwd=tmp_path,
        exit_code=2,
    )
    assert "llama3-405B needs at least" in line
    assert "use a smaller model or batch" in line


@pytest.mark.slow
def test_ranks_that_are_too_large_are_skipped_with_the_reason(tmp_path: pathlib.Path) -> None:
    result = subprocess.run(
        [PACELINE, "bench", "ddp", "--model", "llama3-405B", "--device", "cpu", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    records = [decode_record(line.encode()) for line in result.stdout.splitlines()]
    assert [record.outcome for record in records] == ["skipped", "skipped"]
    assert "the ranks of a host would need at least" in str(records[0].reason)
    assert "use a smaller --model" in str(records[0].reason)


def test_a_user_who_may_not_make_namespaces(tmp_path: pathlib.Path) -> None:
    refusing = tmp_path / "unshare"
    refusing.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n")
    refusing.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    line = _complaint("lab", "run", "--", "true", cwd=tmp_path, exit_code=1, PATH=path)
    assert "Operation not permitted" in line
    assert "run as root, or allow unprivileged user namespaces" in line


def test_a_gpu_that_is_not_there(tmp_path: pathlib.Path) -> None:
    line = _complaint(
        *("bench", "step", "--device", "cuda"), cwd=tmp_path, exit_code=2, CUDA_VISIBLE_DEVICES=""
    )
    assert "cpu" in line
