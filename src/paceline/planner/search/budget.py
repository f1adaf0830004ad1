"""Fewest and cheapest device counts that meet a FLOPs budget and a deadline.

No device exceeds its peak, so the lower bound is FLOPs / (peak x deadline) devices. From there up
to 16 times as many, the search tries host counts with many divisors: 1, 3, 5 or 7 times a power of
two. Each one gets its best layout and a run estimate that includes failures.
"""

import dataclasses
import math

from paceline.accounting.flops import flops_per_token
from paceline.core.errors import UsageError
from paceline.planner.goodput.constants import LLAMA3_DEVICE_INTERVAL_H
from paceline.planner.goodput.formula import DAY_S
from paceline.planner.search.choice import Choice
from paceline.planner.search.costs import Costs
from paceline.planner.search.question import SearchQuestion
from paceline.planner.search.run_estimate import RunEstimate, estimate_run
from paceline.planner.search.search import find_best

_ODD = (1, 3, 5, 7)
_MOST = 16
"""Largest multiple of the lower bound to try. It corresponds to an MFU of 6%."""
_MOST_DEVICES = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetPoint:
    """A number of devices with its best layout and run estimate."""

    devices: int
    choice: Choice
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
    question: SearchQuestion,
    costs: Costs,
    *,
    flops: float,
    deadline_days: float,
    peak_flops: float,
    price: float | None = None,
    device_interval_h: float = LLAMA3_DEVICE_INTERVAL_H,
) -> Budget:
    """Searches the device counts that could meet the deadline.

    Args:
        question: The model and the batch. Its number of devices is ignored.
        costs: Achieved rates of devices and links.
        flops: Model FLOPs of the run.
        deadline_days: Time limit for the whole run, in days.
        peak_flops: Stated peak FLOP/s of a device.
        price: Price of one device-hour, in any currency.
        device_interval_h: Mean hours between two failures of one device.
    """
    tokens = flops / flops_per_token(question.shape, question.context_length).model
    least = flops / (peak_flops * deadline_days * DAY_S)
    if least > _MOST_DEVICES:
        raise UsageError(
            f"{flops:.3g} FLOPs in {deadline_days:g} days take more than {_MOST_DEVICES:,} devices "
            "at their peak; give a later --deadline, or fewer --flops"
        )
    points = []
    for count in device_counts(least, question.devices_per_host):
        best = find_best(dataclasses.replace(question, num_devices=count), costs, peak_flops)
        if best is None:
            continue
        run = estimate_run(
            best,
            question.shape,
            tokens=tokens,
            held_devices=count,
            price=price,
            device_interval_h=device_interval_h,
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
        f"were tried, {fastest.devices:,} devices, takes {fastest.run.days:.3g} days; give a "
        "later --deadline, fewer --flops, or a larger --batch-tokens, which can use more devices"
    )
