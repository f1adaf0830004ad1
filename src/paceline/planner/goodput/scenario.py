"""Scenario of a run on n devices: failures, checkpoints and recovery."""

import dataclasses
import math

from paceline.core.errors import UsageError
from paceline.planner.goodput.cadence import Cadence, Tier
from paceline.planner.goodput.formula import (
    DAY_S,
    HOUR_S,
    best_interval_s,
    equivalent_downtime_s,
    goodput,
    interruption_interval_s,
    replica_share,
)

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
