import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from paceline.core.processes import back_off_s, end_group, error_tail, start_child, wait_for_group

PARENT = """
import sys, time
from paceline.core.processes import start_child
child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
start_child([sys.executable, "-c", child])
time.sleep(60)
"""


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_worker_dies_with_a_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    assert _is_running(worker)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 30
    while _is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(worker)


def _start(code: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", code])


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        (["", ""], (0, None)),
        (["exit(3)", "import time; time.sleep(60)"], (3, "rank 0")),
        # Rank 1 failed first but exits later; rank 0 exits with 1, as after losing a peer.
        (["exit(1)", "import time; time.sleep(0.5); raise SystemExit(3)"], (3, "rank 1")),
        (["exit(1)", "import time; time.sleep(0.2)"], (1, "rank 0")),
        (["exit(1)", "import time; time.sleep(60)"], (1, "rank 0")),
        (["import time; time.sleep(0.5)", "import os; os.kill(os.getpid(), 9)"], (137, "rank 1")),
    ],
)
def test_who_failed_first_is_named(programs: list[str], expected: tuple[int, str | None]) -> None:
    processes = {f"rank {rank}": _start(code) for rank, code in enumerate(programs)}
    assert wait_for_group(processes) == expected
    assert all(process.returncode is not None for process in processes.values())


_ASKS = r"""
import os, signal, subprocess, sys, threading
from paceline.core.processes import wait_for_group

rank = "import signal, sys, time\n"
rank += "signal.signal(signal.SIGUSR1, lambda *_: (time.sleep(0.5), sys.exit(143)))\n"
rank += "print(flush=True)\n"
rank += "time.sleep(float(sys.argv[1]))"
ranks = {
    name: subprocess.Popen([sys.executable, "-c", rank, seconds], stdout=subprocess.PIPE)
    for name, seconds in zip("ab", sys.argv[1:])
}
for each in ranks.values():
    each.stdout.readline()
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
code, culprit = wait_for_group(ranks, grace_s=2)
print(code, culprit, [each.returncode for each in ranks.values()])
"""


@pytest.mark.parametrize(
    ("seconds", "printed"),
    [
        # Both ranks have time to save; in the second case, one finishes before the request.
        (("30", "30"), "143 None [143, 143]\n"),
        (("0.1", "30"), "143 None [0, 143]\n"),
    ],
)
def test_a_request_to_stop_is_passed_on(seconds: tuple[str, ...], printed: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", _ASKS, *seconds], capture_output=True, text=True, timeout=30
    )
    assert result.stdout == printed, result.stderr


_AGENT = """
import os, subprocess, sys
ready = "from paceline.core.processes import die_with_agent; import os, time; "
ready += "die_with_agent(os.environ); os.write(1, b'ready'); time.sleep(30)"
variables = {**os.environ, "TORCHELASTIC_RUN_ID": "run", "RANK": "0"}
child = subprocess.Popen([sys.executable, "-c", ready], env=variables)
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the signal is Linux's")
def test_a_rank_of_torchrun_dies_with_its_agent() -> None:
    agent = subprocess.Popen([sys.executable, "-c", _AGENT], stdout=subprocess.PIPE)
    assert agent.stdout is not None
    rank = int(agent.stdout.readline())
    assert agent.stdout.read(5) == b"ready"
    agent.kill()
    agent.communicate()
    deadline = time.monotonic() + 30
    while _is_running(rank) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(rank)


_LEADER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_session_ends_with_its_descendants() -> None:
    leader = start_child(
        [sys.executable, "-c", _LEADER], start_new_session=True, stdout=subprocess.PIPE
    )
    assert leader.stdout is not None
    with leader.stdout:
        descendant = int(leader.stdout.readline())
        end_group(leader, grace_s=10)
    assert leader.returncode == -signal.SIGTERM
    deadline = time.monotonic() + 30
    while _is_running(descendant) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(descendant)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("host 1 rank 1 | paceline: error: no such file\nbye", "exit code 2: no such file"),
        ("first\n\nlast\n", "exit code 2: last"),
        ("", "exit code 2: it printed nothing"),
    ],
)
def test_the_error_of_a_program_is_in_its_log(
    printed: str, expected: str, tmp_path: pathlib.Path
) -> None:
    log = tmp_path / "log.txt"
    program = f"import sys; sys.stderr.write({printed!r}); sys.exit(2)"
    code = start_child([sys.executable, "-c", program], log=log).wait()
    assert error_tail(log, code) == expected


def test_the_pause_doubles_with_every_failure_up_to_a_limit() -> None:
    pauses = [back_off_s(failures, 0.5, 3.0) for failures in range(6)]
    assert pauses == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]
