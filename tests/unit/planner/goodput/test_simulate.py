"""Tests that the simulation agrees with the formula, where that applies, within its own error."""

import dataclasses
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cli.main import main
from paceline.core import UsageError
from paceline.planner.goodput.scenario import (
    Cadence,
    Failures,
    Recovery,
    Replicas,
    Scenario,
    Tier,
    enough_spare_hosts,
)
from paceline.planner.goodput.simulate import PARTS, simulate

DISK = Tier(name="disk", stall_s=2.0, write_s=0.0, load_s=20.0)
MEMORY = Tier(name="memory", stall_s=0.5, write_s=1.0, load_s=2.0, is_volatile=True)
FAILURES = Failures(device_interval_h=50_000.0)
BASE = Scenario(
    devices=16_384,
    days=60.0,
    failures=dataclasses.replace(FAILURES, hardware_share=0.0, group_share=0.0),
    tiers=(DISK,),
    recovery=Recovery(detection_s=60.0, restart_s=300.0),
)


@settings(max_examples=8, deadline=None)
@given(
    devices=st.sampled_from([1_024, 16_384, 50_000]),
    stall=st.floats(0.1, 30),
    write=st.floats(0, 60),
    downtime=st.floats(0, 900),
    factor=st.floats(0.3, 3),
    seed=st.integers(0, 1000),
)
def test_the_formula(
    devices: int, stall: float, write: float, downtime: float, factor: float, seed: int
) -> None:
    tier = dataclasses.replace(DISK, stall_s=stall, write_s=write, load_s=0.0)
    recovery = Recovery(detection_s=0.0, restart_s=downtime)
    scenario = dataclasses.replace(BASE, devices=devices, tiers=(tier,), recovery=recovery)
    interval = factor * scenario.cadence.interval_s
    scenario = dataclasses.replace(scenario, interval_s=interval)
    found = simulate(scenario, trials=10, seed=seed)
    # Five standard errors, plus the effect of the start and end of a finite run.
    edge = 2 * interval / (60 * 86_400)
    assert found.goodput == pytest.approx(scenario.formula(), abs=2.6 * found.error + edge)
    assert sum(found.shares.values()) == pytest.approx(1.0, abs=1e-6)


def test_without_failures_only_saves_cost() -> None:
    never = dataclasses.replace(BASE.failures, device_interval_h=1e15)
    scenario = dataclasses.replace(BASE, failures=never, interval_s=98.0)
    found = simulate(scenario, trials=2)
    assert found.goodput == pytest.approx(0.98, abs=1e-4)
    assert found.error == pytest.approx(0.0, abs=1e-12)
    assert found.failures_per_day == 0


@pytest.mark.parametrize("devices", [16_384, 60_000])
def test_without_spares_the_formula_weighs_both_downtimes(devices: int) -> None:
    failures = dataclasses.replace(FAILURES, group_share=0.0)
    scenario = dataclasses.replace(BASE, failures=failures, devices=devices)
    found = simulate(scenario, trials=12)
    assert found.goodput == pytest.approx(scenario.formula(), abs=2.6 * found.error)


def test_replicas_agree_with_their_formula() -> None:
    replicas = Replicas(devices_per_replica=128, heartbeat_s=5.0, step_s=6.0, heal_s=600.0)
    scenario = dataclasses.replace(BASE, replicas=replicas, devices=100_096)
    found = simulate(scenario, trials=6)
    assert found.goodput == pytest.approx(scenario.formula(), abs=0.003)


def test_without_replicas_hosts_and_spares_pay_with_them_they_do_not() -> None:
    failures = FAILURES
    spares = enough_spare_hosts(failures, BASE.devices)
    with_spares = dataclasses.replace(BASE.recovery, spare_hosts=spares)
    replicas = Replicas(devices_per_replica=128, heartbeat_s=5.0, step_s=6.0, heal_s=360.0)
    bare = dataclasses.replace(BASE, failures=failures)
    reached = {
        (elastic is not None, recovery.spare_hosts > 0): simulate(
            dataclasses.replace(bare, replicas=elastic, recovery=recovery), trials=6
        ).goodput
        for elastic in (None, replicas)
        for recovery in (BASE.recovery, with_spares)
    }
    assert reached[False, True] > reached[False, False] + 0.05
    assert reached[True, True] < reached[True, False] + 0.02
    assert reached[True, False] > reached[False, True]


def test_memory_is_lost_with_a_group_of_hosts() -> None:
    both = dataclasses.replace(BASE, tiers=(MEMORY, DISK))
    every = dataclasses.replace(BASE.failures, group_share=1.0, job_wide_share=0.0)
    alone, together = (
        simulate(dataclasses.replace(both, failures=failures)).shares["load"]
        for failures in (BASE.failures, every)
    )
    assert together == pytest.approx(alone * DISK.load_s / MEMORY.load_s, rel=0.1)


def test_a_seed_is_a_run() -> None:
    assert simulate(BASE, trials=3, seed=5) == simulate(BASE, trials=3, seed=5)
    assert simulate(BASE, trials=3, seed=5) != simulate(BASE, trials=3, seed=6)


def test_a_hundred_thousand_devices_take_seconds() -> None:
    replicas = Replicas(devices_per_replica=128, heartbeat_s=5.0, step_s=6.0, heal_s=600.0)
    scenario = dataclasses.replace(
        BASE, devices=100_000, failures=FAILURES, tiers=(MEMORY, DISK), replicas=replicas
    )
    began = time.process_time()
    found = simulate(scenario, trials=2)
    assert time.process_time() - began < 30  # 1 s on an idle machine
    assert found.failures_per_day == pytest.approx(48, rel=0.1)
    assert set(found.shares) == set(PARTS)


def test_the_progress_of_long_simulations_is_told() -> None:
    scenario = dataclasses.replace(BASE, devices=600_000, days=20.0)
    told: list[tuple[int, int]] = []
    found = simulate(scenario, trials=3, progress=lambda *each: told.append(each))
    assert found == simulate(scenario, trials=3)
    done, totals = zip(*told, strict=True)
    assert set(totals) == {3 * 20 * 86_400}
    assert list(done) == sorted(set(done))
    assert [sum(each // (20 * 86_400) == run for each in done) for run in range(3)] == [1, 1, 1]


def test_the_command_says_how_long_millions_of_failures_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_arguments: object, **_named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.planner.goodput.simulate.option_records", interrupted)
    assert main(["plan", "goodput", "--devices", "10000000"]) == 130
    (said, _interrupted) = capsys.readouterr().err.splitlines()
    assert said.startswith("simulating about 27,000,000 failures, about 15,000 in a second; fewer")
    assert main(["plan", "goodput", "--devices", "100000"]) == 130
    assert "simulating" not in capsys.readouterr().err


def test_saves_are_counted_as_if_stepped_through() -> None:
    cadence = Cadence(interval_s=10.0, tiers=(MEMORY, DISK), multiples=(1, 3))
    for first in (0, 2, 3):
        time_s, saves = 0.0, []
        for number in range(first + 1, first + 8):
            time_s += 10.0 + 0.5 + (2.0 if number % 3 == 0 else 0.0)
            saves.append(time_s)
        for tenth in range(800):
            up_s = tenth / 10 + 0.05
            count = sum(save <= up_s for save in saves)
            assert cadence.saves_within(first, up_s) == count
            newest = [first + sum(save + 1.0 <= up_s for save in saves), 0]
            disk = [first + index + 1 for index, save in enumerate(saves) if save <= up_s]
            newest[1] = max((each for each in disk if each % 3 == 0), default=0)
            found = cadence.durable(first, up_s, (first, 0))
            assert found == newest


def test_what_cannot_be() -> None:
    with pytest.raises(UsageError, match="last tier"):
        dataclasses.replace(BASE, tiers=(MEMORY,))
    replicas = Replicas(devices_per_replica=128, heartbeat_s=5.0, step_s=6.0, heal_s=1.0)
    with pytest.raises(UsageError, match="too few for two"):
        dataclasses.replace(BASE, devices=128, replicas=replicas)
