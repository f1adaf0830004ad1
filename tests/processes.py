"""Helpers to run Paceline and to inspect the processes that a test starts."""

import contextlib
import io
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

from paceline.cli.main import main


def children_of(pid: int) -> list[int]:
    """Returns the pids of a process's children; none if the process has ended."""
    try:
        listed = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(each) for each in listed.split()]


def process_of_rank(launcher: int, rank: int) -> int:
    """Returns the pid of a rank among the children of its launcher."""
    for pid in children_of(launcher):
        environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
        if f"\0RANK={rank}\0".encode() in b"\0" + environment:
            return pid
    raise ValueError(f"process {launcher} has started no rank {rank}")


def is_running(pid: int) -> bool:
    """Returns whether a process is running; a zombie is not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(happens: Callable[[], object], seconds: float = 150) -> None:
    """Waits until `happens()` is true; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.1)


def start_python(place: pathlib.Path, *words: str) -> "subprocess.Popen[str]":
    """Starts `python -m WORDS` in a directory and in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def paceline(
    place: pathlib.Path, *arguments: str, timeout_s: float = 280
) -> "subprocess.CompletedProcess[str]":
    """Runs a Paceline command in a directory; returns its result even if it fails."""
    return subprocess.run(
        [sys.executable, "-m", "paceline", *arguments],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def call_paceline(place: pathlib.Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Does as `paceline`, but in this process, which has imported everything already.

    For commands that start no ranks: starting Python and importing torch takes seconds.
    """
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(place),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            code = main(arguments)
        except SystemExit as leaving:  # Raised by the argument parser.
            code = leaving.code if isinstance(leaving.code, int) else 1
    return subprocess.CompletedProcess(arguments, code, stdout.getvalue(), stderr.getvalue())
