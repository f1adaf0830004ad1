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
from typing import Literal

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
    rendezvous_s_per_device: float
    """Rendezvous time per device."""
    heal_s: float
    """Time to restart one replica and load its state from a peer."""
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


# TCPStore with libuv: 100 s for 96,000 ranks.
_RENDEZVOUS_S_PER_DEVICE = 100 / 96_000
CONSTANTS: dict[ConstantsName, Constants] = {
    # torchrun on two ranks here: 9 to 11 s, most of it importing torch; torchft's rejoin: 11 s.
    "measured": Constants(
        detection_s=5.0,
        restart_s=11.0,
        rendezvous_s_per_device=_RENDEZVOUS_S_PER_DEVICE,
        heal_s=11.0,
    ),
    # No source publishes all of these. They reproduce Llama 3's effective training time.
    "cluster": Constants(
        detection_s=120.0,
        restart_s=600.0,
        rendezvous_s_per_device=_RENDEZVOUS_S_PER_DEVICE,
        heal_s=600.0,
    ),
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
