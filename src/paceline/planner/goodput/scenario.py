"""Scenario of a run on n devices: failures, checkpoints, recovery; its goodput in closed form.

A job of n devices, each of which fails every m hours on average, is interrupted every M = m / n.
After every t seconds of training it saves, which stops training for c seconds. The save is durable
w seconds later. An interruption loses the work since the newest durable save. Training resumes
after d seconds of detection, restart and load. A failure during this downtime restarts it.

From one durable save to the next, t seconds of training are added. This takes t + c seconds without
a failure, or t + c + w seconds after a failure. With exponentially distributed failures:

    mean downtime D      = M (e^(d / M) - 1)
    E[time between them] = (M + D) (e^((t + c) / M) - 1) e^(w / M)
    goodput              = t / E

For w = 0 this is Daly's complete model (2006). The optimal interval depends on neither d nor w. It
is t = M (1 + W(-e^(-1 - c / M))) with Lambert's W, and for small c Young's sqrt(2 c M) (1974).

Saves are numbered from the start of the run: every save goes to the first tier, every m-th to the
second, and so on. Positions are computed in closed form instead of save by save, so the cost of
simulating a run depends only on its number of failures.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import lambertw

from paceline.core.errors import UsageError

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


def interruption_interval_s(device_failure_interval_h: Any, num_devices: Any) -> Any:
    """Returns the mean time between interruptions of a job, in seconds."""
    return np.asarray(device_failure_interval_h, dtype=np.float64) * HOUR_S / num_devices


def best_interval_s(stall_s: Any, interruption_s: Any) -> Any:
    """Returns the seconds of training between saves that maximize goodput; about sqrt(2 c M)."""
    between = np.asarray(interruption_s, dtype=np.float64)
    # W is undefined below -1/e, which rounding could reach. A save without a stall gives t = 0.
    argument = np.maximum(-np.exp(-1 - stall_s / between), -np.exp(-1))
    return between * np.maximum(1 + np.nan_to_num(lambertw(argument).real, nan=-1.0), 0.0)


def goodput(
    *,
    interval_s: Any,
    stall_s: Any,
    downtime_s: Any,
    interruption_s: Any,
    write_s: Any = 0.0,
    downtime_interruption_s: Any = None,
) -> Any:
    """Returns the fraction of time that is useful training.

    A save is made after `interval_s` of training, stops it for `stall_s` and can be loaded
    `write_s` later. `downtime_interruption_s` is the mean time between failures that restart a
    downtime, if it differs from `interruption_s`.
    """
    interval = np.asarray(interval_s, dtype=np.float64)
    between = np.asarray(interruption_s, dtype=np.float64)
    again = between if downtime_interruption_s is None else np.asarray(downtime_interruption_s)
    # Relative to M, so that a job without interruptions (infinite M) needs no special case.
    segment = (interval + stall_s) / between
    with np.errstate(invalid="ignore"):
        mean_downtime = np.where(np.isinf(again), downtime_s, again * np.expm1(downtime_s / again))
        completed = np.where(segment > 0, segment / np.expm1(segment), 1.0)
    up = 1 / (1 + mean_downtime / between)
    return interval / (interval + stall_s) * completed * np.exp(-write_s / between) * up


def equivalent_downtime_s(downtimes_s: Any, weights: Any, interruption_s: Any) -> Any:
    """Returns the single downtime with the same cost as several that occur with these weights."""
    weights = np.asarray(weights, dtype=np.float64)
    survived = (weights * np.exp(-np.asarray(downtimes_s) / interruption_s)).sum()
    return -interruption_s * np.log(survived)


def replica_share(*, pause_s: Any, absence_s: Any, num_replicas: Any, interruption_s: Any) -> Any:
    """Returns the fraction of work done by a job that continues when it loses single replicas.

    A loss stops the survivors for the heartbeat timeout and the step in flight. The work of the
    lost replica, one of k, is missing until it heals. With an absence of a seconds, a / M replicas
    are absent on average.
    """
    between = np.asarray(interruption_s, dtype=np.float64)
    absent = np.minimum(np.asarray(absence_s) / between / num_replicas, 1.0)
    return np.exp(-np.asarray(pause_s) / between) * (1 - absent)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tier:
    """A destination for checkpoints."""

    name: str
    """memory, disk or s3."""
    stall_s: float
    """Time for which a save stops training."""
    write_s: float
    """Time from the end of the stall until the save can be loaded."""
    load_s: float
    """Time to load a save on all devices at once."""
    is_volatile: bool = False
    """Whether a failure of neighbouring hosts loses the save, as with a copy in a peer's memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cadence:
    """Saves after every interval of training. Tier i gets every multiples[i]-th save."""

    interval_s: float
    tiers: tuple[Tier, ...]
    multiples: tuple[int, ...]

    def time_s(self, first: int, count: int) -> float:
        """Returns the duration of `count` intervals with their saves after save number `first`."""
        stalls = sum(
            tier.stall_s * ((first + count) // multiple - first // multiple)
            for tier, multiple in zip(self.tiers, self.multiples, strict=True)
        )
        return count * self.interval_s + stalls

    def saves_within(self, first: int, up_s: float) -> int:
        """Returns the number of saves that finish stalling in `up_s` seconds without a failure."""
        if up_s <= 0:
            return 0
        mean_s = self.interval_s + sum(
            tier.stall_s / multiple
            for tier, multiple in zip(self.tiers, self.multiples, strict=True)
        )
        count = int(up_s / mean_s)
        while count > 0 and self.time_s(first, count) > up_s:
            count -= 1
        while self.time_s(first, count + 1) <= up_s:
            count += 1
        return count

    def work_s(self, first: int, up_s: float) -> float:
        """Returns the training time, excluding stalls, in `up_s` seconds after save `first`."""
        count = self.saves_within(first, up_s)
        rest_s = up_s - self.time_s(first, count)
        return count * self.interval_s + min(max(rest_s, 0.0), self.interval_s)

    def durable(self, first: int, up_s: float, known: Sequence[int]) -> list[int]:
        """Returns the newest save that each tier can load, `up_s` after resuming from `first`.

        `known` are the newest saves that the tiers could load when training resumed.
        """
        newest = []
        for tier, multiple, before in zip(self.tiers, self.multiples, known, strict=True):
            written = first + self.saves_within(first, up_s - tier.write_s)
            save = written // multiple * multiple
            newest.append(save if save > first else before)
        return newest


DEVICES_PER_HOST = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failures:
    """Failure rate of devices, and the scope of each failure."""

    device_interval_h: float
    """Mean hours between two failures of one device, of any cause."""
    hardware_share: float = 0.78
    """Fraction of failures that require a replacement host. Job-wide failures never do."""
    job_wide_share: float = 0.13
    """Fraction of failures that stop every replica, such as software bugs."""
    group_share: float = 0.02
    """Fraction of failures that stop a group of neighbouring hosts at once."""
    group_hosts: int = 8
    """Number of hosts in such a group."""
    planned_per_day: float = 0.0
    """Planned interruptions per day. The run saves first, so it loses time but no work."""

    def __post_init__(self) -> None:
        if not self.device_interval_h > 0:
            raise UsageError("the interval between a device's failures must be positive")
        for field in ("hardware_share", "job_wide_share", "group_share"):
            if not 0 <= getattr(self, field) <= 1:
                raise UsageError(f"{field} must be between 0 and 1")
        if self.hardware_share + self.job_wide_share > 1 + 1e-9:
            raise UsageError("hardware_share and job_wide_share must not exceed 1 together")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recovery:
    """Recovery times of a run that has stopped entirely."""

    detection_s: float
    """Time from the failure until the job is stopped."""
    restart_s: float
    """Time to start all ranks and complete the rendezvous."""
    replacement_s: float = 1800.0
    """Time to find a replacement host if no spare is left."""
    repair_s: float = DAY_S
    """Time until a failed host is available as a spare again."""
    spare_hosts: int = 0
    """Number of idle standby hosts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replicas:
    """Replicas that continue training when one of them is lost."""

    devices_per_replica: int
    """Number of devices that hold one copy of the model and fail together."""
    heartbeat_s: float
    """Time until the other replicas detect a loss."""
    step_s: float
    """Duration of the step in flight, which is lost."""
    heal_s: float
    """Time for a lost replica to restart and load its state from a peer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run: devices, duration, failures, checkpoint tiers and recovery."""

    devices: int
    days: float
    failures: Failures
    tiers: tuple[Tier, ...]
    recovery: Recovery
    replicas: Replicas | None = None
    """None if any failure restarts the whole job."""
    interval_s: float | None = None
    """Training time between saves to the first tier; None selects the optimum."""

    def __post_init__(self) -> None:
        if self.devices < 1 or not self.days > 0:
            raise UsageError("a run needs devices and days")
        if not self.tiers or self.tiers[-1].is_volatile:
            raise UsageError("the last tier must survive every failure: disk or s3")
        if self.replicas is not None and self.num_replicas < 2:
            raise UsageError(
                f"replicas of {self.replicas.devices_per_replica} devices: {self.devices} devices "
                "are too few for two"
            )

    @property
    def num_replicas(self) -> int:
        """Number of replicas that share the work; 1 if the whole job restarts together."""
        return 1 if self.replicas is None else self.devices // self.replicas.devices_per_replica

    @property
    def interruption_s(self) -> float:
        """Mean time between failures of any device."""
        return float(interruption_interval_s(self.failures.device_interval_h, self.devices))

    @property
    def restart_interval_s(self) -> float:
        """Mean time between failures that restart the whole job."""
        share = 1.0 if self.replicas is None else self.failures.job_wide_share
        return self.interruption_s / share if share else math.inf

    @property
    def cadence(self) -> Cadence:
        """The save schedule. Each tier's interval is optimal for the failures that need it."""
        first = self.interval_s or _interval_s(self.tiers[0], self.restart_interval_s)
        multiples = [1]
        for tier in self.tiers[1:]:
            share = self.failures.group_share
            needed_s = self.restart_interval_s / share if share else math.inf
            every_s = _interval_s(tier, needed_s)
            # Each is a multiple of the previous one, so that a save is also in all faster tiers.
            multiples.append(multiples[-1] * max(1, round(every_s / first / multiples[-1])))
        return Cadence(interval_s=first, tiers=self.tiers, multiples=tuple(multiples))

    @property
    def paid_share(self) -> float:
        """Fraction of the held devices that train. Spares do not train."""
        return self.devices / (self.devices + self.recovery.spare_hosts * DEVICES_PER_HOST)

    def formula(self) -> float:
        """Returns goodput in closed form.

        Exact for one tier, restarts of all devices, and spares that never run out. Planned
        interruptions and replicas are multiplicative factors. Group failures are ignored; only the
        simulation models them.
        """
        tier, recovery, failures = self.tiers[0], self.recovery, self.failures
        downtime_s = recovery.detection_s + recovery.restart_s + tier.load_s
        wait_s = 0.0 if recovery.spare_hosts else recovery.replacement_s
        if self.replicas is None:
            downtime_s = equivalent_downtime_s(
                (downtime_s, downtime_s + wait_s),
                (1 - failures.hardware_share, failures.hardware_share),
                self.interruption_s,
            )
        share = goodput(
            interval_s=self.cadence.interval_s,
            stall_s=tier.stall_s,
            downtime_s=downtime_s,
            interruption_s=self.restart_interval_s,
            write_s=tier.write_s,
            downtime_interruption_s=self.interruption_s,
        )
        planned_per_s = failures.planned_per_day / DAY_S
        share *= math.exp(-planned_per_s * (recovery.restart_s + tier.load_s))
        if self.replicas is not None:
            replicas = self.replicas
            alone = 1 - failures.job_wide_share
            share *= replica_share(
                pause_s=replicas.heartbeat_s + replicas.step_s,
                absence_s=replicas.heartbeat_s
                + replicas.heal_s
                + failures.hardware_share / alone * wait_s,
                num_replicas=self.num_replicas,
                interruption_s=self.interruption_s / alone,
            )
        return float(share) * self.paid_share


def enough_spare_hosts(failures: Failures, devices: int, repair_s: float = DAY_S) -> int:
    """Returns the mean number of hosts in repair plus three standard deviations, rounded up."""
    per_failure = 1 + failures.group_share * (failures.group_hosts - 1)
    per_s = devices / (failures.device_interval_h * HOUR_S)
    in_repair = per_s * failures.hardware_share * per_failure * repair_s
    return math.ceil(in_repair + 3 * math.sqrt(in_repair))


def _interval_s(tier: Tier, interruption_s: float) -> float:
    """Returns the optimal interval, at least the write time and at most an hour."""
    # If no failure needs the tier, hourly saves are nearly free and bound the possible loss.
    if math.isinf(interruption_s):
        return HOUR_S
    best_s = float(best_interval_s(tier.stall_s, interruption_s))
    return min(max(best_s, tier.write_s, 1.0), HOUR_S)
