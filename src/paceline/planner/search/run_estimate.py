"""Estimate of a whole run with a layout: days including failures, device-hours, cost.

After a failure the run restarts from disk, with hot spares if they reduce device-hours. Goodput is
the closed form of `paceline.planner.goodput`. Devices that a layout leaves idle are free spares.
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
    """Estimate of a run over `tokens` tokens."""

    tokens: float
    steps: int
    days_without_failures: float
    days: float
    goodput: float
    """Fraction of time that is useful training."""
    interruptions: float
    """Expected number of interruptions in the whole run."""
    checkpoint_interval_s: float
    spare_hosts: int
    """Number of standby hosts in addition to the layout's devices."""
    held_devices: int
    """Number of devices paid for, including spares."""
    device_hours: float
    cost: float | None
    """Device-hours times the price of a device-hour; None without a price."""


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
    """Returns the run estimate with or without spares, whichever uses fewer device-hours.

    Args:
        choice: The layout.
        shape: The model, which determines the checkpoint size.
        tokens: Tokens of the run.
        held_devices: Number of held devices.
        price: Price of one device-hour, in any currency.
        device_interval_h: Mean hours between two failures of one device.
        experts: Experts of a mixture, all of which are saved.
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
    """Returns the goodput of the training devices. Spares are counted in device-hours instead."""
    return scenario.formula() / scenario.paid_share


def _held(scenario: Scenario, held_devices: int) -> int:
    spares = scenario.recovery.spare_hosts * DEVICES_PER_HOST
    return max(held_devices, scenario.devices + spares)
