import time

import pytest
import torch

from paceline.benchmarks.config import TimedCase
from paceline.benchmarks.harness.measure import Stopwatch, sample


def timed(warmup: int, steps: int, time_limit_s: float) -> TimedCase:
    return TimedCase(device="cpu", warmup=warmup, steps=steps, time_limit_s=time_limit_s)


def test_warmup_is_run_but_not_sampled() -> None:
    runs = iter(range(100))
    progress: list[tuple[int, int]] = []
    samples = sample(
        lambda: {"step_time_s": float(next(runs))},
        timed(2, 3, 60.0),
        lambda completed, total: progress.append((completed, total)),
    )
    assert samples == {"step_time_s": [2.0, 3.0, 4.0]}
    assert progress == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]


def test_the_time_limit_keeps_what_was_sampled() -> None:
    def slow() -> dict[str, float]:
        time.sleep(0.02)
        return {"step_time_s": 0.02}

    samples = sample(slow, timed(0, 1000, 0.1), lambda _done, _total: None)
    assert 1 <= len(samples["step_time_s"]) < 20


def test_the_time_limit_ends_warm_up_too() -> None:
    runs: list[int] = []

    def slow() -> dict[str, float]:
        runs.append(1)
        time.sleep(0.05)
        return {"step_time_s": 0.05}

    samples = sample(slow, timed(100, 100, 0.12), lambda _done, _total: None)
    assert samples == {"step_time_s": [0.05]}
    assert len(runs) < 8


def test_laps_add_up() -> None:
    started = time.perf_counter()
    watch = Stopwatch(torch.device("cpu"))
    laps = []
    for seconds in (0.03, 0.01):
        time.sleep(seconds)
        laps.append(watch.lap())
    elapsed = time.perf_counter() - started
    assert laps[0] >= 0.03
    assert laps[1] >= 0.01
    assert sum(laps) <= elapsed


@pytest.mark.gpu
def test_a_lap_waits_for_the_device() -> None:
    device = torch.device("cuda")
    values = torch.randn(8192, 8192, device=device)
    torch.mm(values, values)
    watch = Stopwatch(device)
    started = time.perf_counter()
    torch.mm(values, values)
    asking = time.perf_counter() - started
    assert watch.lap() > 3 * asking
