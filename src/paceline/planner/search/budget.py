"""Days, device-hours and cost of a run, and the device counts that meet a budget by a deadline.

After a failure a run restarts from disk, with hot spares if they reduce device-hours. Goodput is
the closed form of `paceline.planner.goodput`. Devices that a layout leaves idle are free spares.

No device exceeds its peak, so a deadline takes at least FLOPs / (peak x deadline) devices. From
there up to 16 times as many, the search tries host counts with many divisors: 1, 3, 5 or 7 times a
power of two.
"""

import dataclasses
import math

from paceline.accounting.counts import all_parameters, flops_per_token
from paceline.core.errors import UsageError
from paceline.core.specs import Experts, ModelShape
from paceline.core.units import format_digits
from paceline.planner.goodput.options import CONSTANTS, LLAMA3_DEVICE_INTERVAL_H, options
from paceline.planner.goodput.scenario import DAY_S, DEVICES_PER_HOST, HOUR_S, Scenario
from paceline.planner.search.search import Candidate, find_best
from paceline.planner.search.spec import PerformanceModel, SearchSpec

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
    choice: Candidate,
    shape: ModelShape,
    *,
    tokens: float,
    held_devices: int,
    price: float | None = None,
    device_interval_h: float = LLAMA3_DEVICE_INTERVAL_H,
    experts: Experts | None = None,
) -> RunEstimate:
    """Returns the run estimate with or without spares, whichever uses fewer device-hours."""
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


_ODD = (1, 3, 5, 7)
_MOST = 16
"""Largest multiple of the lower bound to try. It corresponds to an MFU of 6%."""
_MOST_DEVICES = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetPoint:
    """A number of devices with its best layout and run estimate."""

    devices: int
    choice: Candidate
    run: RunEstimate
    in_time: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Every number of devices with a layout, fewest first."""

    points: tuple[BudgetPoint, ...]
    tokens: float
    deadline_days: float

    @property
    def smallest(self) -> BudgetPoint:
        """The point with the fewest devices that meets the deadline."""
        return min(self._in_time, key=lambda point: (point.devices, point.run.days))

    @property
    def cheapest(self) -> BudgetPoint:
        """The point with the fewest device-hours that meets the deadline."""
        return min(self._in_time, key=lambda point: (point.run.device_hours, point.devices))

    @property
    def _in_time(self) -> list[BudgetPoint]:
        return [point for point in self.points if point.in_time]


def device_counts(least: float, devices_per_host: int) -> list[int]:
    """Returns device counts with many divisors, from `least` to 16 times as many."""
    counts = set()
    for odd in _ODD:
        count = odd * devices_per_host
        while count <= min(max(_MOST * least, devices_per_host), _MOST_DEVICES):
            if count >= least:
                counts.add(count)
            count *= 2
    return sorted(counts)


def plan_budget(
    spec: SearchSpec,
    performance: PerformanceModel,
    *,
    flops: float,
    deadline_days: float,
    peak_flops: float,
    price: float | None = None,
    device_interval_h: float = LLAMA3_DEVICE_INTERVAL_H,
) -> Budget:
    """Searches the device counts that could meet the deadline; that of the spec is ignored."""
    tokens = flops / flops_per_token(spec.shape, spec.context_length).model
    least = flops / (peak_flops * deadline_days * DAY_S)
    if least > _MOST_DEVICES:
        raise UsageError(
            f"{flops:.3g} FLOPs in {deadline_days:g} days take more than {_MOST_DEVICES:,} devices "
            "at their peak; give a later --deadline, or fewer --flops"
        )
    points = []
    for count in device_counts(least, spec.devices_per_host):
        best = find_best(dataclasses.replace(spec, num_devices=count), performance, peak_flops)
        if best is None:
            continue
        run = estimate_run(
            best,
            spec.shape,
            tokens=tokens,
            held_devices=count,
            price=price,
            device_interval_h=device_interval_h,
            experts=spec.experts,
        )
        in_time = run.days <= deadline_days
        points.append(BudgetPoint(devices=count, choice=best, run=run, in_time=in_time))
    if not any(point.in_time for point in points):
        _raise_too_late(points, least, deadline_days)
    return Budget(points=tuple(points), tokens=tokens, deadline_days=deadline_days)


def _raise_too_late(points: list[BudgetPoint], least: float, deadline_days: float) -> None:
    if not points:
        raise UsageError(
            f"no layout from {math.ceil(least):,} to {math.ceil(_MOST * least):,} devices divides "
            "the batch and fits; give a larger --batch-tokens, or a smaller model"
        )
    fastest = min(points, key=lambda point: point.run.days)
    raise UsageError(
        f"no number of devices meets {deadline_days:g} days: the fastest of {len(points)} that "
        f"were tried, {fastest.devices:,} devices, takes {format_digits(fastest.run.days)} days; "
        "give a later --deadline, fewer --flops, or a larger --batch-tokens, which can use more "
        "devices"
    )
