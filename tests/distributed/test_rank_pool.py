import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from paceline.parallel import RankError, RankPool
from tests.processes import is_running

pytestmark = pytest.mark.host("how ranks are started and end")


def _process_id(rank: int, world_size: int) -> int:
    values = torch.ones(1)
    dist.all_reduce(values)
    assert values.item() == world_size
    return os.getpid()


def _raise(rank: int, _world_size: int) -> None:
    if rank == 1:
        raise ValueError("unhappy")
    dist.barrier()


def _unpicklable(_rank: int, _world_size: int) -> object:
    return lambda: None


def test_a_second_function_runs_on_the_same_ranks() -> None:
    with RankPool(2, timeout_s=60) as pool:
        first = pool.run(_process_id)
        started = time.monotonic()
        assert pool.run(_process_id) == first
        assert time.monotonic() - started < 20


def test_after_a_failure_new_ranks_are_started() -> None:
    with RankPool(2, timeout_s=60) as pool:
        first = pool.run(_process_id)
        started = time.monotonic()
        with pytest.raises(RankError, match=r"rank 1 failed:(?s:.*)unhappy"):
            pool.run(_raise)
        assert time.monotonic() - started < 30
        for pid in first:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        assert set(pool.run(_process_id)).isdisjoint(first)


def _end_of_file(_rank: int, _world_size: int) -> None:
    raise EOFError("a truncated file")


def test_any_error_of_a_function_is_reported() -> None:
    with (
        RankPool(2, timeout_s=60) as pool,
        pytest.raises(RankError, match=r"EOFError: a truncated"),
    ):
        pool.run(_end_of_file)


def test_a_rank_that_died_in_between_is_an_error_of_its_own() -> None:
    with RankPool(2, timeout_s=60) as pool:
        pids = pool.run(_process_id)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RankError, match="rank"):
            pool.run(_process_id)
        assert len(pool.run(_process_id)) == 2


def test_a_result_that_cannot_be_sent_is_an_error() -> None:
    with RankPool(1, timeout_s=60) as pool, pytest.raises(RankError, match="pickle"):
        pool.run(_unpicklable)


def test_nothing_is_left_when_a_pool_is_closed(rank_pool: Callable[[int], RankPool]) -> None:
    with RankPool(2, timeout_s=60) as pool:
        pids = pool.run(_process_id)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert len(rank_pool(2).run(_process_id)) == 2


def _variable(_rank: int, _world_size: int) -> str:
    return os.environ["PACELINE_TEST_VARIABLE"]


def test_ranks_have_the_environment_of_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("first", "second"):
        monkeypatch.setenv("PACELINE_TEST_VARIABLE", value)
        with RankPool(1, timeout_s=60) as pool:
            assert pool.run(_variable) == [value]


@pytest.mark.slow
@pytest.mark.parametrize(
    "then",
    [
        pytest.param("return", id="idle", marks=pytest.mark.slow),
        pytest.param("time.sleep(60)", id="busy"),
    ],
)
def test_ranks_end_with_a_program_that_is_killed(tmp_path: pathlib.Path, then: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, time\n"
        "from paceline.parallel import RankPool\n"
        "def tell_process_id(rank, world_size):\n"
        "    os.write(1, b'%d\\n' % os.getpid())\n"
        f"    {then}\n"
        "if __name__ == '__main__':\n"
        "    with RankPool(2, timeout_s=60) as pool:\n"
        "        pool.run(tell_process_id)\n"
        "        time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        pids = [int(running.stdout.readline()) for _ in range(2)]
        running.kill()
    deadline = time.monotonic() + 30
    while alive := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def test_what_ranks_are_forked_from_has_no_threads_and_no_device() -> None:
    code = (
        "import torch, threading, pathlib\n"
        "def refuse(*_): raise AssertionError('a device was asked for')\n"
        "torch.cuda.is_available = torch.cuda.device_count = torch.cuda.init = refuse\n"
        "import paceline.parallel.ranks.launch\n"
        "assert threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
