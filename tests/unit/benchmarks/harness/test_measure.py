import time

import pytest
import torch

from paceline.benchmarks.harness.measure import Stopwatch, sample, step_peaks, storage_bytes
from paceline.core.host import reset_resident_peak, resident_peak_bytes
from paceline.core.units import MIB
from paceline.devices.hardware import usable_memory_bytes

CPU = torch.device("cpu")


def ignore_progress(_completed: int, _total: int) -> None:
    pass


def test_warmup_is_run_but_not_sampled() -> None:
    runs = iter(range(100))
    progress: list[tuple[int, int]] = []
    samples = sample(
        lambda: {"step_time_s": float(next(runs))},
        warmup=2,
        steps=3,
        time_limit_s=60.0,
        on_progress=lambda completed, total: progress.append((completed, total)),
    )
    assert samples == {"step_time_s": [2.0, 3.0, 4.0]}
    assert progress == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]


def test_the_time_limit_keeps_what_was_sampled() -> None:
    def slow() -> dict[str, float]:
        time.sleep(0.02)
        return {"step_time_s": 0.02}

    samples = sample(slow, warmup=0, steps=1000, time_limit_s=0.1, on_progress=ignore_progress)
    assert 1 <= len(samples["step_time_s"]) < 20


def test_the_time_limit_ends_warm_up_too() -> None:
    runs: list[int] = []

    def slow() -> dict[str, float]:
        runs.append(1)
        time.sleep(0.05)
        return {"step_time_s": 0.05}

    samples = sample(slow, warmup=100, steps=100, time_limit_s=0.12, on_progress=ignore_progress)
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


def test_shared_storage_counts_once() -> None:
    base = torch.zeros(100)
    assert storage_bytes([base, base[:10], base.view(10, 10), torch.zeros(5)]) == 420


def test_peaks_are_exact_per_phase() -> None:
    resident = torch.zeros(1000)
    kept: list[torch.Tensor] = []

    def first() -> None:
        kept.append(torch.empty(2 * MIB, dtype=torch.uint8))
        torch.empty(5 * MIB, dtype=torch.uint8)

    def second() -> None:
        kept.append(torch.empty(3 * MIB, dtype=torch.uint8))

    def third() -> None:
        kept.clear()

    peaks = step_peaks(
        CPU, resident_tensors=[resident], phases={"first": first, "second": second, "third": third}
    )
    assert peaks == {"first": 4000 + 7 * MIB, "second": 4000 + 5 * MIB, "third": 4000 + 5 * MIB}


def test_the_resident_peak_follows_and_resets() -> None:
    reset_resident_peak()  # Other tests may have raised it.
    before = resident_peak_bytes()
    block = torch.ones(200 * MIB // 4)
    assert resident_peak_bytes() >= before + 150 * MIB
    del block
    reset_resident_peak()
    assert resident_peak_bytes() < before + 150 * MIB


def test_some_memory_is_usable() -> None:
    usable = usable_memory_bytes(CPU)
    assert usable is not None
    assert usable > 100 * MIB
