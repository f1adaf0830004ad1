"""What a whole run takes with a layout: days with failures, device-hours, money.

A run that fails restarts from disk, with hot spares where they pay; the share of time that trains
is `paceline.planner.goodput`'s closed form. Devices that a layout leaves idle are spares for free.
"""

import dataclasses

from paceline.core.specs import Experts, ModelShape
from paceline.planner.cost.experts import all_parameters
from paceline.planner.goodput.constants import CONSTANTS, LLAMA3_DEVICE_INTERVAL_H
from paceline.planner.goodput.formula import DAY_S, HOUR_S
from paceline.planner.goodput.options import options
from paceline.planner.goodput.scenario import DEVICES_PER_HOST, Scenario
from paceline.planner.search.choice import Choice

_SAVED_BYTES_PER_PARAMETER = 12
"""float32 weights and AdamW's two moments."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunEstimate:
    """A run of so many tokens."""

    tokens: float
    steps: int
    days_without_failures: float
    days: float
    goodput: float
    """Share of the time that ends up in the model."""
    interruptions: float
    """Expected number in the whole run."""
    checkpoint_interval_s: float
    spare_hosts: int
    """Hosts that stand by beyond the devices of the layout."""
    held_devices: int
    """Devices that are paid for, spares included."""
    device_hours: float
    cost: float | None
    """Device-hours times the price of one."""


def estimate_run(
    choice: Choice,
    shape: ModelShape,
    *,
    tokens: float,
    held_devices: int,
    price: float | None = None,
    device_interval_h: float = LLAMA3_DEVICE_INTERVAL_H,
    experts: Experts | None = None,
) -> RunEstimate:
    """Returns what a run takes, with or without spare hosts, whichever costs fewer device-hours.

    Args:
        choice: The layout.
        shape: The model, whose states are saved.
        tokens: Tokens of the run.
        held_devices: Devices that are held.
        price: Of one device-hour, in any currency.
        device_interval_h: Mean hours between two failures of one device.
        experts: Those of a mixture, all of which are saved.
    """
    step_s = choice.step_time_s.value
    tokens_per_step = choice.tokens_per_s * step_s
    steps = max(1, round(tokens / tokens_per_step))
    training_s = tokens / choice.tokens_per_s
    saved = all_parameters(shape, experts) * _SAVED_BYTES_PER_PARAMETER
    constants = dataclasses.replace(
        CONSTANTS["cluster"], step_s=step_s, state_bytes_per_device=saved / choice.devices
    )
    offered = options((choice.devices,), constants, device_interval_h=device_interval_h)
    restarts = [
        option.scenario
        for option in offered
        if option.recovery == "restart" and option.checkpoint == "disk"
    ]

    def hours(scenario: Scenario) -> float:
        return _held(scenario, held_devices) * training_s / _share(scenario) / HOUR_S

    scenario = min(restarts, key=hours)
    share = _share(scenario)
    elapsed_s = training_s / share
    device_hours = hours(scenario)
    return RunEstimate(
        tokens=tokens,
        steps=steps,
        days_without_failures=training_s / DAY_S,
        days=elapsed_s / DAY_S,
        goodput=share,
        interruptions=elapsed_s / scenario.interruption_s,
        checkpoint_interval_s=scenario.cadence.interval_s,
        spare_hosts=scenario.recovery.spare_hosts,
        held_devices=_held(scenario, held_devices),
        device_hours=device_hours,
        cost=None if price is None else price * device_hours,
    )


def _share(scenario: Scenario) -> float:
    """Returns goodput of the devices that train; those that stand by count in device-hours."""
    return scenario.formula() / scenario.paid_share


def _held(scenario: Scenario, held_devices: int) -> int:
    spares = scenario.recovery.spare_hosts * DEVICES_PER_HOST
    return max(held_devices, scenario.devices + spares)
