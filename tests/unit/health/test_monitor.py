"""Tests of which updates are applied, and what is said about a step; a spike is a loss far above
recent ones, relative to their spread."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from paceline.core.errors import UsageError
from paceline.health import monitor as monitor_module
from paceline.health.checksum import StateTensor
from paceline.health.config import SPIKE, STRAGGLER, HealthConfig
from paceline.health.monitor import HealthMonitor, RecentLosses
from tests.unit.health.ranks import agreed

CPU = torch.device("cpu")
WATCHDOG = cast(Any, SimpleNamespace(take_stopped_s=lambda: 0.25))


class _Stragglers:
    """Takes the place of `Stragglers`, and tells what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[float, float]] = []
        self.considered: list[Sequence[float]] = []

    def notes(self, own_s: float, stopped_s: float) -> Sequence[float]:
        self.told.append((own_s, stopped_s))
        return 8.0, 9.0

    def consider(self, sums: Sequence[float]) -> None:
        self.considered.append(sums)

    def find(self, step: int) -> list[str]:
        return [f"rank 1 is slow in step {step}"]


@pytest.fixture
def stragglers(monkeypatch: pytest.MonkeyPatch) -> _Stragglers:
    fake = _Stragglers()
    monkeypatch.setattr(monitor_module, "Stragglers", lambda device: fake)
    return fake


def _monitor(
    tensors: Sequence[torch.Tensor] = (), *, world_size: int = 1, **config: Any
) -> HealthMonitor:
    named = [
        StateTensor(name=f"tensor {number}", values=values, is_replicated=True)
        for number, values in enumerate(tensors)
    ]
    return HealthMonitor(HealthConfig(**config), lambda: named, CPU, world_size, WATCHDOG)


def _with_losses(number: int = 20, **config: Any) -> HealthMonitor:
    """Returns a monitor of which so many losses of 2 are known; then 2.2 is no spike yet."""
    monitor = _monitor(**config)
    for _ in range(number):
        assert monitor.should_apply(2.0, 1.0, monitor.notes())
    return monitor


@pytest.mark.parametrize(
    ("world_size", "is_on", "num_notes"), [(1, True, 1), (2, True, 3), (2, False, 1)]
)
def test_only_several_ranks_are_searched_for_stragglers(
    stragglers: _Stragglers, world_size: int, is_on: bool, num_notes: int
) -> None:
    monitor = _monitor(world_size=world_size, stragglers=is_on)
    assert len(monitor.notes()) == num_notes
    assert len(stragglers.told) == (num_notes > 1)


def test_own_work_is_the_time_of_a_step_without_its_waits(
    stragglers: _Stragglers, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, waited_s = 100.0, 7.0
    monkeypatch.setattr(monitor_module, "time", SimpleNamespace(perf_counter=lambda: now_s))
    monkeypatch.setattr(monitor_module, "waited_s", lambda: waited_s)
    monitor = _monitor(world_size=2)
    now_s = 101.0
    monitor.notes()
    now_s, waited_s = 110.0, 8.0
    monitor.begin_step()
    now_s, waited_s = 114.0, 8.5
    assert monitor.notes() == (0.0, 8.0, 9.0)
    assert stragglers.told == [(1.0, 0.25), (3.5, 0.25)]


def test_sums_of_the_ranks_notes_reach_the_search_for_stragglers(stragglers: _Stragglers) -> None:
    monitor = _monitor(world_size=2)
    assert monitor.should_apply(1.0, 1.0, [0.0, 16.0, 18.0])
    assert stragglers.considered == [[16.0, 18.0]]
    assert monitor.findings(5, 1.0) == [(STRAGGLER, "rank 1 is slow in step 5")]


def test_a_good_step_is_applied_and_counted() -> None:
    monitor = _monitor()
    assert monitor.num_applied == 0
    for number in (1, 2, 3):
        assert monitor.should_apply(3.0, 1.0, [0.0])
        assert monitor.num_applied == number
        assert (monitor.skip_reason, monitor.spike_limit) == (None, None)
        assert monitor.findings(number, 3.0) == []


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_loss", [True, False])
def test_what_is_not_finite_is_not_applied_and_is_no_spike(loss: float, is_loss: bool) -> None:
    monitor = _monitor()
    assert not monitor.should_apply(*((loss, 1.0) if is_loss else (1.0, loss)), [0.0])
    assert (monitor.skip_reason, monitor.spike_limit) == ("nonfinite", None)
    assert monitor.num_applied == 0
    assert monitor.should_apply(1.0, 1.0, [0.0])
    assert monitor.skip_reason is None


def test_damage_of_any_rank_comes_before_all_other_reasons() -> None:
    monitor = _with_losses(on_spike="skip")
    assert not monitor.should_apply(math.nan, 1.0, [1.0])
    assert monitor.skip_reason == "corrupted"
    assert not monitor.should_apply(99.0, 1.0, [2.0])
    assert monitor.skip_reason == "corrupted"


def test_a_spike_is_above_the_limit_and_not_at_it() -> None:
    monitor = _with_losses(on_spike="skip")
    assert monitor.should_apply(2.2, 1.0, [0.0])
    assert monitor.spike_limit is None
    assert not monitor.should_apply(2.21, 1.0, [0.0])
    assert (monitor.skip_reason, monitor.spike_limit) == ("spike", 2.2)


def test_a_reported_spike_is_applied() -> None:
    monitor = _with_losses()
    assert monitor.should_apply(5.0, 1.0, [0.0])
    assert monitor.skip_reason is None
    assert monitor.num_applied == 21
    assert monitor.findings(21, 5.0) == [(SPIKE, "loss 5, above the spike limit 2.2")]
    assert monitor.should_apply(2.0, 1.0, [0.0])
    assert monitor.findings(22, 2.0) == []


@pytest.mark.parametrize("loss", [50.0, math.nan])
def test_losses_of_skipped_steps_do_not_count_as_recent(loss: float) -> None:
    monitor = _with_losses(19, on_spike="skip")
    assert not monitor.should_apply(math.nan, 1.0, [0.0])
    assert monitor.should_apply(2.0, 1.0, [0.0])  # The twentieth; with it, there is a limit.
    for _ in range(100):
        assert not monitor.should_apply(loss, 1.0, [0.0])
    assert not monitor.should_apply(2.21, 1.0, [0.0])
    assert monitor.num_applied == 20


def test_a_few_losses_make_no_limit() -> None:
    losses = RecentLosses(10)
    for number in range(19):
        losses.add(5.0 + number % 2)
    assert losses.limit == math.inf
    losses.add(5.0)
    assert losses.limit < math.inf


def test_the_limit_follows_the_spread_and_not_the_outliers() -> None:
    losses = RecentLosses(10)
    for number in range(100):
        losses.add(3.0 + 0.1 * (number % 3))
    limit = losses.limit
    assert 4.0 < limit < 5.0
    losses.add(1e6)
    assert losses.limit == limit


def test_equal_losses_make_no_spike_of_a_ripple() -> None:
    losses = RecentLosses(10)
    for _ in range(50):
        losses.add(2.0)
    assert losses.limit == 2.2


def test_only_the_last_hundred_losses_count() -> None:
    losses = RecentLosses(10)
    for _ in range(100):
        losses.add(9.0)
    for _ in range(100):
        losses.add(2.0)
    assert losses.limit == 2.2


def test_damage_at_rest_is_noted_until_the_checksum_is_taken_again() -> None:
    weights = torch.ones(4)
    monitor = _monitor([weights], hash_at_rest=True)
    monitor.update_checksum()
    assert monitor.notes() == (0.0,)
    weights[2] = 3.0
    assert monitor.notes() == (1.0,)
    monitor.update_checksum()
    assert monitor.notes() == (0.0,)


def test_without_hashes_at_rest_nothing_is_noted() -> None:
    weights = torch.ones(4)
    monitor = _monitor([weights])
    monitor.update_checksum()
    weights[2] = 3.0
    assert monitor.notes() == (0.0,)


@pytest.mark.parametrize(
    ("step", "at_once", "every", "is_due"),
    [
        (6, False, 3, True),
        (7, False, 3, False),
        (7, True, 3, True),
        (6, True, 0, False),
        (6, False, 1, True),
    ],
)
def test_ranks_are_compared_when_it_is_due(
    step: int, at_once: bool, every: int, is_due: bool
) -> None:
    def program(rank: int) -> str | None:
        monitor = _monitor(
            [torch.full((3,), float(rank == 1))], world_size=3, hash_every_steps=every
        )
        return monitor.find_damage(step, at_once=at_once)

    found = agreed(3, program)
    assert found == ("rank 1 differs from 2 of 3 ranks, first in tensor 0" if is_due else None)


def test_a_single_rank_has_nobody_to_be_compared_with() -> None:
    """There is no process group in this test."""
    assert _monitor([torch.ones(3)], hash_every_steps=1).find_damage(1, at_once=True) is None


@pytest.mark.parametrize("happened_at_rest", [True, False])
def test_a_rank_that_changed_at_rest_is_the_corrupted_one(happened_at_rest: bool) -> None:
    """Of two ranks that differ, only this shows which; an update may have gone wrong as well."""

    def program(rank: int) -> tuple[str | None, str]:
        weights = torch.zeros(3)
        monitor = _monitor([weights], world_size=2, hash_every_steps=1, hash_at_rest=True)
        monitor.update_checksum()
        weights[0] = float(rank)
        if not happened_at_rest:
            monitor.update_checksum()
        return monitor.find_damage(1, at_once=False), monitor.explain_corruption()

    found, explained = agreed(2, program)
    if happened_at_rest:
        assert found == explained == "rank 1: tensor 0 has changed since the last update"
    else:
        assert found.startswith("ranks 0 and 1 differ, first in tensor 0")
        assert explained == ""


@pytest.mark.parametrize("name", ["spike_threshold", "most_in_a_row", "step_timeout_s"])
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_limits_are_positive_and_finite(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=rf"watch\.{name} {value} must be positive"):
        HealthConfig(**cast(Any, {name: value}))
    assert getattr(HealthConfig(**cast(Any, {name: 1})), name) == 1


def test_comparisons_may_be_left_out_but_not_be_negative() -> None:
    assert HealthConfig(hash_every_steps=0).hash_every_steps == 0
    with pytest.raises(UsageError, match=r"watch\.hash_every_steps -1 must not be negative"):
        HealthConfig(hash_every_steps=-1)
