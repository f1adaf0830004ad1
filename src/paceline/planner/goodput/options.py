"""Options of recovery, spare hosts and checkpoints to compare, with the constants behind them.

There are two sets of constants. `measured` holds this project's restart and replica times on a
small machine, with the published growth of the rendezvous: a lower bound set by software. `cluster`
holds times that large runs report or imply, including queues, health checks and human intervention.

Llama 3's run can be simulated too. Published (The Llama 3 Herd of Models, 2024): 16,384 devices, 54
days, 419 unexpected and 47 planned interruptions, an effective training time of more than 90%,
storage of 2 TB/s sustained. Not published, so assumed here and varied one by one: detection time,
restart time, checkpoint interval and the stall of a save.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from paceline.core.units import GB, MB, TB
from paceline.planner.goodput.scenario import (
    Failures,
    Recovery,
    Replicas,
    Scenario,
    Tier,
    enough_spare_hosts,
)

ConstantsName = Literal["measured", "cluster"]
CheckpointName = Literal["memory", "disk", "s3"]

LLAMA3_DEVICES = 16_384
LLAMA3_DAYS = 54
LLAMA3_UNEXPECTED = 419
LLAMA3_PLANNED = 47
LLAMA3_EFFECTIVE = 0.90
"""Published as "higher than 90%" (The Llama 3 Herd of Models, 2024, section 3.3.4)."""
LLAMA3_DEVICE_INTERVAL_H = LLAMA3_DAYS * 24 * LLAMA3_DEVICES / LLAMA3_UNEXPECTED
"""Mean hours between two unexpected interruptions by one device: 50,700."""
LLAMA3_STORAGE_BYTES_PER_S = 2 * TB
"""Sustained bandwidth of the checkpoint storage (section 3.3.1)."""
LLAMA3_STATE_BYTES = 405e9 * 12
"""fp32 weights and AdamW's two moments for 405 billion parameters. The format is assumed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
    """One set of times, sizes and bandwidths."""

    detection_s: float
    """Time from a failure until the job is stopped."""
    restart_s: float
    """Time to start all ranks, excluding the rendezvous."""
    heal_s: float
    """Time to restart one replica and load its state from a peer."""
    rendezvous_s_per_device: float = 100 / 96_000
    """Rendezvous time per device. TCPStore with libuv: 100 s for 96,000 ranks."""
    heartbeat_s: float = 5.0
    """Timeout after which survivors drop a replica: torchft's default."""
    step_s: float = 6.0
    """Step time of Llama 3 405B: 16 million tokens at 400 TFLOP/s per device."""
    state_bytes_per_device: float = LLAMA3_STATE_BYTES / LLAMA3_DEVICES
    """Weights and optimizer state that one device saves; the model grows with the cluster."""
    stall_s: float = 0.5
    """Time for which an asynchronous save stops training: the copy to host memory."""
    memory_bytes_per_s: float = 1 * GB
    """Bandwidth of one device into the memory of a peer host."""
    disk_bytes_per_s: float = LLAMA3_STORAGE_BYTES_PER_S / LLAMA3_DEVICES
    """Bandwidth per device when all devices write; storage grows with the cluster."""
    s3_bytes_per_s: float = 12 * MB
    """Bandwidth per device when all devices write."""

    def restart_of(self, devices: int) -> float:
        """Returns the time for `devices` devices to start and complete the rendezvous."""
        return self.restart_s + self.rendezvous_s_per_device * devices

    def tiers(self, checkpoint: CheckpointName) -> tuple[Tier, ...]:
        """Returns the tiers of a checkpoint choice. Memory needs disk as a durable second tier."""
        speeds = {
            "memory": self.memory_bytes_per_s,
            "disk": self.disk_bytes_per_s,
            "s3": self.s3_bytes_per_s,
        }
        names: tuple[CheckpointName, ...] = (
            ("memory", "disk") if checkpoint == "memory" else (checkpoint,)
        )
        return tuple(
            Tier(
                name=name,
                # Both tiers are written from one copy in host memory, so only the first stalls.
                stall_s=self.stall_s if name == names[0] else 0.0,
                write_s=self.state_bytes_per_device / speeds[name],
                load_s=self.state_bytes_per_device / speeds[name],
                is_volatile=name == "memory",
            )
            for name in names
        )


CONSTANTS: dict[ConstantsName, Constants] = {
    # torchrun on two ranks here: 9 to 11 s, most of it importing torch; torchft's rejoin: 11 s.
    "measured": Constants(detection_s=5.0, restart_s=11.0, heal_s=11.0),
    # No source publishes all of these. They reproduce Llama 3's effective training time.
    "cluster": Constants(detection_s=120.0, restart_s=600.0, heal_s=600.0),
}
ASSUMPTIONS = (
    "failures are exponential, 50,700 device-hours apart (Llama 3: 419 in 54 days on 16,384), "
    "and strike in downtime, too",
    "78% need another host, 13% stop every replica, 2% take 8 neighbouring hosts at once",
    "a replacement takes 30 minutes where no spare is left, the repair of a host a day",
    "a replica has 128 devices; losing one costs the others the heartbeat's 5 s and a step of 6 s",
    "a device saves 297 MB: to a peer's memory at 1 GB/s, to disk at 122 MB/s (Llama 3's 2 TB/s "
    "for all), to S3 at 12 MB/s; training stops for 0.5 s",
)


RecoveryName = Literal["restart", "replicas"]
CHECKPOINTS: tuple[CheckpointName, ...] = ("s3", "disk", "memory")
_DEVICES_PER_REPLICA = 128


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
) -> Iterator[Option]:
    """Yields every option for each device count. Replicas need devices for at least two."""
    failures = Failures(device_interval_h=device_interval_h)
    for count in devices:
        spares = enough_spare_hosts(failures, count)
        replicas = Replicas(
            devices_per_replica=_DEVICES_PER_REPLICA,
            heartbeat_s=constants.heartbeat_s,
            step_s=constants.step_s,
            heal_s=constants.heal_s,
        )
        names: tuple[RecoveryName, ...] = ("restart", "replicas")
        names = names if count >= 2 * _DEVICES_PER_REPLICA else ("restart",)
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
                ),
            )


_WRITE_S = LLAMA3_STATE_BYTES / LLAMA3_STORAGE_BYTES_PER_S


LLAMA3 = Scenario(
    devices=LLAMA3_DEVICES,
    days=LLAMA3_DAYS,
    failures=Failures(
        device_interval_h=LLAMA3_DEVICE_INTERVAL_H, planned_per_day=LLAMA3_PLANNED / LLAMA3_DAYS
    ),
    # A save is a synchronous write of 4.9 TB at 2 TB/s, at the interval that is best for it.
    tiers=(Tier(name="disk", stall_s=_WRITE_S, write_s=0.0, load_s=_WRITE_S),),
    # Health checks are included. The cluster had more hosts than the job used: no wait for another.
    recovery=Recovery(detection_s=120.0, restart_s=600.0, replacement_s=0.0),
)
"""The published run, with assumed values for unpublished parameters."""


def variations() -> Iterator[tuple[str, Scenario]]:
    """Yields the published run as assumed, then with each assumption varied, and a description."""

    def recovery(**changes: Any) -> Scenario:
        return dataclasses.replace(LLAMA3, recovery=dataclasses.replace(LLAMA3.recovery, **changes))

    yield "as assumed", LLAMA3
    for minutes in (0.5, 5.0, 10.0):
        yield f"detection takes {minutes:g} min, not 2", recovery(detection_s=60 * minutes)
    for minutes in (2.0, 5.0, 15.0, 20.0):
        yield f"restart takes {minutes:g} min, not 10", recovery(restart_s=60 * minutes)
    for minutes in (10.0, 30.0, 60.0):
        apart = dataclasses.replace(LLAMA3, interval_s=60 * minutes)
        yield f"saves {minutes:g} min apart, not 3.8", apart
    for seconds in (0.5, 30.0):
        tiers = (dataclasses.replace(LLAMA3.tiers[0], stall_s=seconds),)
        stalls = dataclasses.replace(LLAMA3, tiers=tiers)
        yield f"a save stops training for {seconds:g} s, not 2.4", stalls
    yield "30 min for another host, not 0", recovery(replacement_s=1800.0)
