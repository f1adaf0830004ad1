"""Tests of stop requests to a run, at any moment."""

import os
import signal
import subprocess
import sys
import time

import pytest

from paceline.training.run import StopRequest

# Blocks in C without the GIL and without handling signals, as a collective does.
_DEAF = """
import ctypes, os, sys
from paceline.training.run import StopRequest

with StopRequest(float(sys.argv[1])) as stop:
    os.write(1, b"ready\\n")
    libc = ctypes.CDLL(None)
    for _ in range(20):
        while libc.sleep(1):
            pass
os._exit(3)
"""


def _deaf(grace_s: float) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", _DEAF, str(grace_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_the_first_signal_sets_a_flag(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest(60) as stop:
        assert stop.received is None
        # A signal that a launcher forwards arrives twice, and counts once.
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        deadline = time.monotonic() + 30
        while stop.received is None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert stop.received == number
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_leaves_at_once(number: signal.Signals) -> None:
    process = _deaf(60)
    process.send_signal(number)
    time.sleep(1.1)
    assert process.poll() is None
    process.send_signal(number)
    _, error = process.communicate(timeout=3)
    assert process.returncode == 143
    assert f"a second {number.name}; resume from the last checkpoint" in error


def test_who_cannot_save_in_time_leaves() -> None:
    process = _deaf(0.5)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=3)
    assert process.returncode == 143
    assert "not saved within the 0.5 s of checkpoint.grace_s" in error
