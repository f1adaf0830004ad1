"""Tests that comparisons that exceed memory are refused before any rank starts."""

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.accounting import count_parameters
from paceline.benchmarks.config import StepCase, StepSweep
from paceline.benchmarks.strategies import memory_obstacle
from paceline.core.strategies import StrategyName

(CASE,) = StepSweep(model=("bytes-6M",), context=(16,), batch=1, device="cpu").cases()
# Weights, gradients and two moments in float32.
STATES = 16 * count_parameters(CASE.shape).total


def obstacle(usable: float, strategies: list[StrategyName], **topology: object) -> str | None:
    """Returns why four ranks cannot run the strategies, or None."""
    ranks: Any = SimpleNamespace(
        run=lambda _function: int(usable),
        world_size=4,
        topology={"device": "cpu", "num_hosts": 1, **topology},
    )
    case: StepCase = CASE
    return memory_obstacle(ranks, case, strategies)


def test_everything_that_is_held_at_once_counts_gradients_too() -> None:
    compared: list[StrategyName] = ["torch_ddp", "ddp", "flat"]
    said = obstacle(11.9 * STATES, compared)
    assert said is not None
    assert "the ranks of a host would need at least" in said
    assert "fewer --strategies" in said
    assert obstacle(12.1 * STATES, compared) is None


def test_hosts_share_what_ranks_hold_unless_they_are_virtual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert obstacle(2.1 * STATES, ["torch_ddp"], num_hosts=2) is None
    monkeypatch.setenv("PACELINE_LINK_RATE_BITS_PER_S", "1e9")
    assert obstacle(3.9 * STATES, ["torch_ddp"], num_hosts=2) is not None
    assert obstacle(4.1 * STATES, ["torch_ddp"], num_hosts=2) is None


def test_a_gpu_has_its_own_memory() -> None:
    said = obstacle(0.9 * STATES, ["torch_ddp"], device="cuda")
    assert said is not None
    assert said.startswith("a device")
    assert obstacle(1.1 * STATES, ["torch_ddp"], device="cuda") is None
    assert obstacle(0.6 * STATES, ["fsdp"], device="cuda") is None
