"""All combinations of recovery method, spare hosts and checkpoint destination to compare."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

from paceline.planner.goodput.constants import LLAMA3_DEVICE_INTERVAL_H, CheckpointName, Constants
from paceline.planner.goodput.scenario import (
    Failures,
    Recovery,
    Replicas,
    Scenario,
    enough_spare_hosts,
)

RecoveryName = Literal["restart", "replicas"]
CHECKPOINTS: tuple[CheckpointName, ...] = ("s3", "disk", "memory")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One scenario with the choices that define it."""

    recovery: RecoveryName
    checkpoint: CheckpointName
    scenario: Scenario


def options(
    devices: Sequence[int],
    constants: Constants,
    *,
    days: float = 60.0,
    device_interval_h: float = LLAMA3_DEVICE_INTERVAL_H,
    devices_per_replica: int = 128,
    interval_s: float | None = None,
) -> Iterator[Option]:
    """Yields every option for each device count. Replicas need devices for at least two."""
    failures = Failures(device_interval_h=device_interval_h)
    for count in devices:
        spares = enough_spare_hosts(failures, count)
        replicas = Replicas(
            devices_per_replica=devices_per_replica,
            heartbeat_s=constants.heartbeat_s,
            step_s=constants.step_s,
            heal_s=constants.heal_s,
        )
        names: tuple[RecoveryName, ...] = ("restart", "replicas")
        names = names if count >= 2 * devices_per_replica else ("restart",)
        for name, spare_hosts, checkpoint in itertools.product(names, (0, spares), CHECKPOINTS):
            yield Option(
                recovery=name,
                checkpoint=checkpoint,
                scenario=Scenario(
                    devices=count,
                    days=days,
                    failures=failures,
                    tiers=constants.tiers(checkpoint),
                    recovery=Recovery(
                        detection_s=constants.detection_s,
                        restart_s=constants.restart_of(count),
                        spare_hosts=spare_hosts,
                    ),
                    replicas=replicas if name == "replicas" else None,
                    interval_s=interval_s,
                ),
            )
