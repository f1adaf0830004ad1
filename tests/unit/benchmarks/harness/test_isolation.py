import os
import pathlib
import signal
import time
from collections.abc import Callable

import pytest
import torch

from paceline.benchmarks.harness.isolation import run_isolated
from paceline.core.units import GIB

Progress = Callable[[int, int], None]


def _answer(argument: int, on_progress: Progress) -> int:
    on_progress(1, 2)
    print("this must not reach stdout")  # noqa: T201
    return argument + 1


def _raise(_argument: None, _on_progress: Progress) -> None:
    raise ValueError("a reason\nwith details")


def _allocate(num_gib: float, _on_progress: Progress) -> int:
    return torch.ones(int(num_gib * GIB / 4)).numel()


def _kill_self(_argument: None, _on_progress: Progress) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _exit(_argument: None, _on_progress: Progress) -> None:
    os._exit(7)


def _sleep(pid_file: str, _on_progress: Progress) -> None:
    pathlib.Path(pid_file).write_text(str(os.getpid()))
    time.sleep(60)


def test_a_result_and_progress_come_back(capfd: pytest.CaptureFixture[str]) -> None:
    progress: list[tuple[int, int]] = []
    run = run_isolated(
        _answer,
        41,
        memory_limit_bytes=None,
        timeout_s=60,
        on_progress=lambda completed, total: progress.append((completed, total)),
    )
    assert (run.outcome, run.result, run.reason) == ("ok", 42, None)
    assert progress == [(1, 2)]
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "this must not reach stdout" in captured.err


def test_an_error_is_an_outcome_with_its_first_line() -> None:
    run = run_isolated(_raise, None, memory_limit_bytes=None, timeout_s=60)
    assert (run.outcome, run.reason) == ("failed", "ValueError: a reason")


def test_the_memory_limit_is_enforced() -> None:
    limit = 3 * GIB
    assert run_isolated(_allocate, 1, memory_limit_bytes=limit, timeout_s=60).outcome == "ok"
    run = run_isolated(_allocate, 4, memory_limit_bytes=limit, timeout_s=60)
    assert run.outcome == "out_of_memory"
    assert run.reason is not None
    assert "allocate" in run.reason


def test_a_killed_child_counts_as_out_of_memory() -> None:
    run = run_isolated(_kill_self, None, memory_limit_bytes=None, timeout_s=60)
    assert run.outcome == "out_of_memory"
    assert "killed by the kernel" in str(run.reason)


def test_a_child_that_vanishes_is_a_failure() -> None:
    run = run_isolated(_exit, None, memory_limit_bytes=None, timeout_s=60)
    assert (run.outcome, "code 7" in str(run.reason)) == ("failed", True)


def test_a_late_child_is_stopped(tmp_path: pathlib.Path) -> None:
    pid_file = tmp_path / "pid"
    # On a busy machine, a child may not have begun after 12 seconds.
    for timeout_s in (12, 24, 48):
        run = run_isolated(_sleep, str(pid_file), memory_limit_bytes=None, timeout_s=timeout_s)
        assert run.outcome == "timeout"
        if pid_file.exists():
            break
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
