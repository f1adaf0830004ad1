"""A directory that two hosts share over a file system whose locks each kernel keeps to itself.

Each host is a mount namespace and a process namespace with its own FUSE mount of the directory,
which is to locks what NFS without a lock daemon is: nobody sees those of another host.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from paceline.core.lock import LEASE_S
from paceline.training.run_directory import audit_run
from tests.end_to_end.zipf_text import last_step, prepare_text, small_run
from tests.processes import until

_SMALL = small_run(steps=3000, save_every=100)
_HOST = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0
        or shutil.which("bindfs") is None
        or not pathlib.Path("/dev/fuse").exists(),
        reason="two hosts with FUSE mounts need root, bindfs and /dev/fuse",
    ),
]


@pytest.fixture
def place(tmp_path: pathlib.Path) -> pathlib.Path:
    prepare_text(tmp_path, "run.toml")
    (tmp_path / "shared").mkdir()
    return tmp_path


def _start_host(place: pathlib.Path, mount: str) -> "subprocess.Popen[str]":
    """Trains on a host that sees `place / "shared"` at `place / mount`, and there in `run`."""
    (place / mount).mkdir(exist_ok=True)
    words = [sys.executable, "-m", "paceline", "train", "run.toml", *_SMALL]
    return subprocess.Popen(
        [*_HOST, f'bindfs shared {mount} && exec "$@"', "sh", *words, "--set", f"out={mount}/run"],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_second_host_is_refused_and_takes_over_when_the_first_is_lost(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _start_host(place, "first")
    try:
        until(lambda: last_step(place / "shared" / "run") > 200)
        second = _start_host(place, "second")
        _, stderr = second.communicate(timeout=120)
        assert first.poll() is None
        assert second.returncode == 2, stderr
        assert "run is in use (paceline train, " in stderr
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    began = time.monotonic()
    with _start_host(place, "second") as third:
        _, stderr = third.communicate(timeout=280)
    assert third.returncode == 0, stderr
    assert time.monotonic() - began > LEASE_S
    monkeypatch.chdir(place)
    (place / "first").rmdir()
    (place / "first").symlink_to("shared")
    assert audit_run(place / "shared" / "run") == (3000, [])
