"""Simulation of Llama 3's run with its published interruption rates.

Published (The Llama 3 Herd of Models, 2024): 16,384 devices, 54 days, 419 unexpected and 47 planned
interruptions, an effective training time of more than 90%, storage of 2 TB/s sustained. Not
published: detection time, restart time, checkpoint interval and the stall of a save. These are
assumed here and varied one by one.
"""

import dataclasses
from collections.abc import Iterator

from paceline.planner.goodput.cadence import Tier
from paceline.planner.goodput.constants import (
    LLAMA3_DAYS,
    LLAMA3_DEVICE_INTERVAL_H,
    LLAMA3_DEVICES,
    LLAMA3_PLANNED,
    LLAMA3_STATE_BYTES,
    LLAMA3_STORAGE_BYTES_PER_S,
)
from paceline.planner.goodput.scenario import Failures, Recovery, Scenario

_WRITE_S = LLAMA3_STATE_BYTES / LLAMA3_STORAGE_BYTES_PER_S


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assumed:
    """Assumed values for unpublished parameters."""

    detection_s: float = 120.0
    """Time from a failure until the job is stopped."""
    restart_s: float = 600.0
    """Time to start all ranks and complete the rendezvous, health checks included."""
    stall_s: float = _WRITE_S
    """Time for which a save stops training: a synchronous write of 4.9 TB at 2 TB/s."""
    interval_s: float | None = None
    """Training time between saves; None selects the optimum for the stall."""
    wait_s: float = 0.0
    """Wait for a replacement host; 0 because the cluster had more hosts than the job used."""


def llama3(assumed: Assumed) -> Scenario:
    """Returns the scenario of the published run under these assumptions."""
    tier = Tier(name="disk", stall_s=assumed.stall_s, write_s=0.0, load_s=_WRITE_S)
    return Scenario(
        devices=LLAMA3_DEVICES,
        days=LLAMA3_DAYS,
        failures=Failures(
            device_interval_h=LLAMA3_DEVICE_INTERVAL_H, planned_per_day=LLAMA3_PLANNED / LLAMA3_DAYS
        ),
        tiers=(tier,),
        recovery=Recovery(
            detection_s=assumed.detection_s,
            restart_s=assumed.restart_s,
            replacement_s=assumed.wait_s,
        ),
        interval_s=assumed.interval_s,
    )


def variations() -> Iterator[tuple[str, Assumed]]:
    """Yields the default assumptions, then variations of each one, with a description."""
    yield "as assumed", Assumed()
    for minutes in (0.5, 5.0, 10.0):
        yield f"detection takes {minutes:g} min, not 2", Assumed(detection_s=60 * minutes)
    for minutes in (2.0, 5.0, 15.0, 20.0):
        yield f"restart takes {minutes:g} min, not 10", Assumed(restart_s=60 * minutes)
    for minutes in (10.0, 30.0, 60.0):
        yield f"saves {minutes:g} min apart, not 3.8", Assumed(interval_s=60 * minutes)
    for seconds in (0.5, 30.0):
        yield f"a save stops training for {seconds:g} s, not 2.4", Assumed(stall_s=seconds)
    yield "30 min for another host, not 0", Assumed(wait_s=1800.0)
