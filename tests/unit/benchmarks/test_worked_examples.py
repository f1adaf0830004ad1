"""Checks the arithmetic of docs/benchmarking-a-step.md against the hardware table."""

import math
import statistics

import pytest

from paceline.accounting import count_parameters
from paceline.accounting.collectives import bus_factor
from paceline.core import find_device, model_preset


def test_an_optimizer_that_outruns_memory_was_not_synchronised() -> None:
    moved_bytes = 7 * 4 * count_parameters(model_preset("large")).total
    assert moved_bytes == pytest.approx(27.1e9, rel=0.01)
    needed = moved_bytes / 0.53e-3
    assert needed == pytest.approx(51e12, rel=0.01)
    assert needed / find_device("h100-sxm").memory_bytes_per_s.value == pytest.approx(15, abs=0.5)


def test_attention_that_outruns_the_peak_was_not_synchronised() -> None:
    flops = 4 * 8 * 16384**2 * 128
    needed = flops / 0.000222
    assert needed == pytest.approx(4.95e15, rel=0.01)
    assert needed / find_device("h100-sxm").peak("bfloat16").value == pytest.approx(5, abs=0.1)
    assert (8192 / 256) ** 2 == 1024


def test_a_kernel_at_two_hundredths_of_the_peak_multiplied_in_float32() -> None:
    """Checks the arithmetic of docs/attention.md."""
    flops = 4 * 32768**2 * 128 / 2
    assert flops == pytest.approx(275e9, rel=0.01)
    reached = flops / 13.56e-3
    assert reached == pytest.approx(20.3e12, rel=0.01)
    assert reached / find_device("h100-sxm").peak("bfloat16").value == pytest.approx(0.02, abs=5e-4)
    one_matrix = 65536**2 * 4
    assert one_matrix == pytest.approx(17.2e9, rel=0.01)


def test_one_cold_step_explains_mean_and_deviation() -> None:
    outlier = 12.9 + 10 * (29.2 - 12.9)
    samples = [12.9] * 9 + [outlier]
    assert outlier == pytest.approx(176, abs=0.5)
    assert statistics.fmean(samples) == pytest.approx(29.2, abs=0.05)
    assert statistics.stdev(samples) == pytest.approx((outlier - 12.9) / math.sqrt(10))
    assert statistics.stdev(samples) == pytest.approx(52.1, abs=1.0)
    assert statistics.median(samples) == 12.9


def test_a_constant_time_per_layer_is_launching() -> None:
    milliseconds = {"small": 35, "medium": 73, "large": 97, "xl": 132, "2.7B": 79}
    per_layer = [time / model_preset(name).num_layers for name, time in milliseconds.items()]
    assert [round(value, 1) for value in per_layer] == [2.9, 3.0, 2.7, 2.8, 2.5]


@pytest.mark.parametrize(
    ("seconds", "bus_bandwidths"),
    [
        ({2: 0.7987, 4: 1.0348, 6: 1.2857}, [1.25, 1.45, 1.30]),
        ({2: 5.617e-3, 4: 7.419e-3, 6: 8.344e-3}, [178, 202, 200]),
        ({2: 0.424514, 4: 0.675741, 6: 0.846845}, [2.4, 2.2, 2.0]),
    ],
)
def test_bus_bandwidths_of_published_all_reduces(
    seconds: dict[int, float], bus_bandwidths: list[float]
) -> None:
    computed = [bus_factor("all_reduce", ranks) / time for ranks, time in seconds.items()]
    assert computed == pytest.approx(bus_bandwidths, rel=0.02)


def test_nvlink_is_used_to_two_thirds_by_the_published_a100_all_reduce() -> None:
    line = find_device("a100-sxm-80gb").links[0].bytes_per_s.value
    assert 178e9 / line == pytest.approx(0.59, abs=0.01)
    assert 202e9 / line == pytest.approx(0.67, abs=0.01)


def test_what_the_timed_set_up_hides() -> None:
    assert pytest.approx(16.6e9, rel=0.01) == 0.999e9 / (0.424514 - 0.364509)
