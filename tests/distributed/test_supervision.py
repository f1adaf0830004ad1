"""Ranks that die, hang or cannot succeed under a supervisor; no model, torch imported once."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.processes import children_of, is_running

pytestmark = [
    pytest.mark.host("how ranks are restarted"),
    pytest.mark.skipif(sys.platform != "linux", reason="forks, and shares a memory file"),
]

_SCENARIOS = """
import os, signal, subprocess, sys, time
import torch
import torch.distributed as dist
from paceline.parallel import distributed_session
from paceline.parallel.ranks.heartbeats import Phase, beat, beat_final, beat_step
from paceline.parallel.ranks.supervisor import supervise


def rank(trouble):
    def run(restarts):
        with distributed_session(timeout_s=60) as session:
            for step in range(1, 6):
                beat(Phase.FORWARD)
                dist.all_reduce(torch.ones(1000))
                beat_step(step, step)
                dist.barrier()  # Then the heartbeats of the rank in trouble are the oldest.
                if step == 3 and session.rank == 1:
                    code = trouble(restarts)
                    if code is not None:
                        os._exit(code)
            if session.rank == 0:
                print(f"done after {[each.failure.exit_code for each in restarts]}", flush=True)
        return 0

    return run


def killed(restarts):
    if len(restarts) < 1:
        os.kill(os.getpid(), signal.SIGKILL)

def always_killed(restarts):
    os.kill(os.getpid(), signal.SIGKILL)

def hangs(restarts):
    if len(restarts) < 1:
        time.sleep(100)

def makes_no_sense(restarts):
    return 2

def gives_up(restarts):
    beat_final()
    return 1

def fails_once(restarts):
    if restarts:
        return None
    # The supervisor sees the end of both ranks at once: of this one, and of its peer that lost it.
    supervisor = os.getppid()
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {supervisor}"])
    os.kill(supervisor, signal.SIGSTOP)
    return 1

def trains(restarts):
    print("training", flush=True)
    time.sleep(100)


for name in sys.argv[1:]:
    code = supervise(
        rank(globals()[name]), num_ranks=2, max_restarts=9, hang_s=2.5, grace_s=5
    )
    print(name, code, flush=True)
"""


@pytest.fixture
def script(tmp_path: pathlib.Path) -> str:
    (tmp_path / "scenarios.py").write_text(_SCENARIOS)
    return str(tmp_path / "scenarios.py")


def test_what_is_restarted_and_what_is_not(script: str) -> None:
    names = ("killed", "fails_once", "hangs", "always_killed", "makes_no_sense", "gives_up")
    result = subprocess.run(
        [sys.executable, script, *names], capture_output=True, text=True, timeout=120
    )
    assert result.stdout.splitlines() == [
        *("done after [137]", "killed 0"),
        *("done after [1]", "fails_once 0"),
        *("done after [137]", "hangs 0"),
        "always_killed 137",
        "makes_no_sense 2",
        "gives_up 1",
    ], result.stderr
    said = [line for line in result.stderr.splitlines() if line.startswith("paceline: rank 1 ")]
    where = "in forward after step 3"
    ended = f"paceline: rank 1 ended with exit code 137, {where}"
    assert said[0] == f"{ended}; restart 1 of at most 9"
    assert said[1] == f"paceline: rank 1 ended with exit code 1, {where}; restart 1 of at most 9"
    assert said[2].startswith("paceline: rank 1 sent no heartbeat for ")
    assert said[5] == f"{ended}; failed 3 times in a row before step 4 was done"
    assert said[6] == f"paceline: rank 1 ended with exit code 2, {where}; a restart would not help"
    assert len(said) == 8


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGKILL, -9), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_no_rank_outlives_its_supervisor(script: str, number: signal.Signals, code: int) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, script, "trains"], stdout=subprocess.PIPE, text=True
    )
    assert supervisor.stdout is not None
    assert supervisor.stdout.readline() == "training\n"
    ranks = children_of(supervisor.pid)
    assert len(ranks) == 2
    os.kill(supervisor.pid, number)
    printed, _ = supervisor.communicate(timeout=60)
    if number == signal.SIGTERM:
        assert printed == f"trains {code}\n"
    else:
        assert supervisor.returncode == code
    deadline = time.monotonic() + 30
    while any(is_running(rank) for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(is_running(rank) for rank in ranks)
