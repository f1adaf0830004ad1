"""torchrun restarts killed ranks, and ranks do not outlive its agent."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from paceline.training.run_directory import audit_run
from paceline.training.toml_config import encode_config
from tests.distributed.small_runs import changed as changed_run
from tests.distributed.small_runs import losses_of, small_run
from tests.processes import children_of, is_running

pytestmark = pytest.mark.host("how ranks find each other")

BIN = pathlib.Path(sys.executable).parent
_OPTIONS = (
    *("--nproc-per-node", "2", "--standalone", "--max-restarts", "3", "--monitor-interval", "0.2"),
    *("--rdzv-conf", "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"),
)

_RESTARTED = """
import os, signal, time
import torch
import torch.distributed as dist
from paceline.parallel import distributed_session

is_first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if os.environ["RANK"] == "0" and not is_first_attempt:
    time.sleep(3)  # The other rank is back before, and finds what the dead ones have left.
with distributed_session(timeout_s=60) as session:
    total = torch.tensor([session.rank + 1.0])
    dist.all_reduce(total)
    if is_first_attempt and session.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(total)
    if session.rank == 0:
        print(f"{total.item():g}", flush=True)
"""


def _start(*command: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [str(BIN / "torchrun"), *_OPTIONS, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_restarted_ranks_meet(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "restarted.py"
    script.write_text(_RESTARTED)
    stdout, stderr = _start(str(script)).communicate(timeout=120)
    assert stdout == "6\n", stderr


@pytest.mark.slow
def test_ranks_die_with_a_killed_agent(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import time\n"
        "from paceline.parallel import distributed_session\n"
        "with distributed_session(timeout_s=60):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
    )
    agent = _start(str(script))
    assert agent.stdout is not None
    assert [agent.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    workers = children_of(agent.pid)
    agent.kill()
    killed = time.monotonic()
    agent.communicate()
    assert len(workers) == 2
    while any(is_running(pid) for pid in workers):
        assert time.monotonic() - killed < 30
        time.sleep(0.05)


@pytest.mark.slow
def test_a_run_under_torchrun_survives_kills_to_the_bit(tmp_path: pathlib.Path) -> None:
    sections = {"training": {"steps": 60}, "checkpoint": {"every_steps": 5}}
    config = changed_run(small_run(tmp_path), "killed", **sections)
    whole = changed_run(config, "whole")
    for each in (config, whole):
        file = pathlib.Path(f"{each.out}.toml")
        file.write_text(encode_config(each))
    train = (str(BIN / "paceline"), "train")
    _, stderr = _start("--no-python", *train, f"{whole.out}.toml").communicate(timeout=120)
    assert len(losses_of(whole)) == 60, stderr
    agent = _start("--no-python", *train, f"{config.out}.toml")
    for victim, step in ((0, 12), (1, 31)):
        while _last_step(config.out) < step:
            assert agent.poll() is None
            time.sleep(0.002)
        os.kill(children_of(agent.pid)[victim], signal.SIGKILL)
        # The restarted run drops the rows of steps after the checkpoint it resumes from.
        while _last_step(config.out) >= step and agent.poll() is None:
            time.sleep(0.002)
    _, stderr = agent.communicate(timeout=120)
    assert agent.returncode == 0, stderr
    assert losses_of(config) == losses_of(whole)
    assert audit_run(pathlib.Path(config.out)) == (60, [])


def _last_step(out: str) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        rows = pathlib.Path(out, "metrics.jsonl").read_bytes().splitlines()
        return int(json.loads(rows[-1])["step"])
    return 0
