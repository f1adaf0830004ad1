"""Forecasts of a run's peak memory against the peaks of the emulated device's allocator."""

import statistics
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.parallel import RankPool
from paceline.training.config import RunConfig
from studies.planner.device_memory import (
    Case,
    base_run,
    measured_bytes,
    memory_cases,
    predicted_bytes,
)
from tests import devices

_MOST, _MEDIAN = 0.01, 0.005
_SAMPLE = 8
_CASES = [case for case in memory_cases() if case.world_size == 2]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    # Of their own: from the first case on, they run the fused kernels.
    with RankPool(2, backend=devices.backend(), timeout_s=120) as pool:
        yield pool


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return base_run(tmp_path_factory.mktemp("memory"))


def _ratios(ranks: RankPool, base: RunConfig, cases: Sequence[Case]) -> dict[str, float]:
    """Returns predicted over measured peaks."""
    configs = {case.name: case.config(base) for case in cases}
    return {
        name: predicted_bytes(config, ranks.world_size) / measured_bytes(ranks, config)
        for name, config in configs.items()
    }


def _require_close(ratios: dict[str, float]) -> None:
    errors = {name: abs(ratio - 1) for name, ratio in ratios.items()}
    assert {name: ratios[name] for name, error in errors.items() if error > _MOST} == {}
    assert statistics.median(errors.values()) <= _MEDIAN


def _sample() -> list[Case]:
    """Returns cases of different strategies and different ways."""
    plain = [case for case in _CASES if not case.layout]
    return [plain[number * len(plain) // _SAMPLE + number % 5] for number in range(_SAMPLE)]


def test_forecasts_are_the_peaks_of_the_allocator(ranks: RankPool, base: RunConfig) -> None:
    ratios = _ratios(ranks, base, _sample())
    assert len(ratios) == _SAMPLE
    _require_close(ratios)
    for name in ratios:
        with pytest.raises(AssertionError):
            _require_close({**ratios, name: 1.03 * ratios[name]})


@pytest.mark.slow
def test_all_forecasts_are_the_peaks_of_the_allocator(ranks: RankPool, base: RunConfig) -> None:
    assert len(_CASES) >= 60
    _require_close(_ratios(ranks, base, _CASES))


def _fused_and_composed(_rank: int, _world_size: int) -> list[float]:
    """Returns the largest differences between the fused kernels and a CPU's, and their names."""
    devices.emulated().fuse_kernels()
    found: dict[str, list[Tensor]] = {}
    for kind in ("cpu", "emulated"):
        torch.manual_seed(0)
        x, weight, given = (
            torch.randn(size).to(kind) for size in ((3, 2, 8, 16), (16,), (3, 2, 8, 16))
        )
        leaves = [x.requires_grad_(), weight.requires_grad_()]
        normed = F.silu(F.rms_norm(x, (16,), weight, 1e-5))
        mixed = F.scaled_dot_product_attention(normed, normed, normed, is_causal=True)
        mixed.backward(given)
        found[kind] = [mixed, *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    pairs = zip(found["cpu"], found["emulated"], strict=True)
    return [float((one - other.cpu()).abs().max()) for one, other in pairs]


def test_fused_kernels_compute_what_a_cpu_does(ranks: RankPool) -> None:
    for differences in ranks.run(_fused_and_composed):
        assert len(differences) == 3
        assert max(differences) < 1e-5
