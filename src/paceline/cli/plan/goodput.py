"""``paceline plan goodput``: simulates the goodput of long runs when devices fail."""

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Literal

from paceline.cli.output import (
    Flat,
    OutputOptions,
    case_progress,
    keep_records,
    require_figure,
    stdout_console,
)
from paceline.core.errors import UsageError
from paceline.core.units import parse_bytes, parse_rate, parse_seconds

if TYPE_CHECKING:
    from paceline.planner.goodput.options import Constants


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoodputCommand:
    """Simulate failures in long runs: restarts or replicas, spare hosts, kinds of checkpoints.

    By default, devices fail as often as in the training of Llama 3. Times are those of large
    clusters or those measured on a small machine; flags override them.
    """

    devices: tuple[int, ...] = (1_024, 16_384, 100_000)
    """Numbers of devices to simulate."""
    days: float = 60.0
    """Length of the run, in days."""
    constants: Literal["cluster", "measured"] = "cluster"
    """Where times come from: reports of large runs, or Paceline measured on a small machine."""
    device_interval_h: float | None = None
    """Mean hours between failures of one device; by default 50,700, as for Llama 3."""
    detection: str | None = None
    """Time from a failure until the job is stopped, such as 30s."""
    restart: str | None = None
    """Time to start all ranks, such as 5min; the rendezvous comes on top."""
    heal: str | None = None
    """Time to restart one replica, with its state from a peer."""
    devices_per_replica: int = 128
    """Devices that hold one copy of the model."""
    state_per_device: str | None = None
    """Bytes that each device saves in a checkpoint, such as 300MB."""
    disk_bandwidth: str | None = None
    """Disk bandwidth of one device when all devices write, such as 122MB/s."""
    s3_bandwidth: str | None = None
    """S3 bandwidth of one device when all devices write."""
    stall: str | None = None
    """Time that saving a checkpoint stops training."""
    interval: str | None = None
    """Training time between checkpoints; by default, the best interval."""
    replay: bool = False
    """Replay Llama 3's published interruptions instead; unpublished constants are varied."""
    trials: int = 8
    """Simulated runs per case."""
    seed: int = 0
    """Random seed of the simulations."""
    figure: pathlib.Path | None = None
    """Also draw goodput against devices: a file that ends in .png or .svg."""
    store: pathlib.Path | None = None
    """JSON Lines file to append the records to."""
    output: Flat[OutputOptions]

    def __post_init__(self) -> None:
        if not self.devices or min(self.devices) < 1 or self.devices_per_replica < 1:
            raise UsageError("--devices and --devices-per-replica must be at least 1")
        if self.trials < 1 or not self.days > 0:
            raise UsageError("--trials and --days must be positive")
        if self.figure is not None and self.replay:
            raise UsageError(
                "--figure plots goodput over devices, which --replay does not vary; leave one out"
            )
        require_figure(self.figure)

    def run(self) -> int:
        """Simulates runs and prints tables with the assumptions."""
        return self._replay() if self.replay else self._simulate()

    def _simulate(self) -> int:
        from paceline.planner.goodput.options import ASSUMPTIONS, LLAMA3_DEVICE_INTERVAL_H, options
        from paceline.planner.goodput.simulate import option_records
        from paceline.records import capture_environment
        from paceline.reports.tables.reliability import gains_table, goodput_table

        changes = self._changes()
        chosen = list(
            options(
                self.devices,
                self._constants(changes),
                days=self.days,
                device_interval_h=self.device_interval_h or LLAMA3_DEVICE_INTERVAL_H,
                devices_per_replica=self.devices_per_replica,
                interval_s=_optional_seconds(self.interval, "interval"),
            )
        )
        with case_progress(len(chosen)) as progress:
            made = option_records(
                chosen,
                capture_environment(),
                constants=f"{self.constants}, changed" if changes else self.constants,
                trials=self.trials,
                seed=self.seed,
                done=progress.next_case,
            )
            records = list(keep_records(made, self.store, self.output))
        if not self.output.json:
            console = stdout_console()
            for devices in self.devices:
                console.print(
                    goodput_table([each for each in records if each.case["devices"] == devices])
                )
            changed = f"; changed: {', '.join(changes)}" if changes else ""
            notes = (f"constants: {self.constants}{changed}", *ASSUMPTIONS)
            console.print(gains_table(records, tuple(f"- {note}" for note in notes)))
        if self.figure is not None:
            from paceline.reports.plots.reliability import plot_goodput
            from paceline.reports.plots.style import save_as

            save_as(plot_goodput(records), self.figure)
        return 0

    def _replay(self) -> int:
        from paceline.planner.goodput.options import LLAMA3_EFFECTIVE
        from paceline.planner.goodput.simulate import replay_records
        from paceline.records import capture_environment
        from paceline.reports.tables.reliability import replay_table

        made = replay_records(capture_environment(), trials=self.trials, seed=self.seed)
        records = list(keep_records(made, self.store, self.output))
        if not self.output.json:
            stdout_console().print(replay_table(records, LLAMA3_EFFECTIVE))
        return 0

    def _changes(self) -> dict[str, float]:
        """Returns the constants that flags override."""
        given = {
            "detection_s": _optional_seconds(self.detection, "detection"),
            "restart_s": _optional_seconds(self.restart, "restart"),
            "heal_s": _optional_seconds(self.heal, "heal"),
            "stall_s": _optional_seconds(self.stall, "stall"),
            "state_bytes_per_device": self.state_per_device and parse_bytes(self.state_per_device),
            "disk_bytes_per_s": self.disk_bandwidth and parse_rate(self.disk_bandwidth) / 8,
            "s3_bytes_per_s": self.s3_bandwidth and parse_rate(self.s3_bandwidth) / 8,
        }
        return {name: float(value) for name, value in given.items() if value is not None}

    def _constants(self, changes: dict[str, float]) -> "Constants":
        from paceline.planner.goodput.options import CONSTANTS

        return dataclasses.replace(CONSTANTS[self.constants], **changes)


def _optional_seconds(text: str | None, what: str) -> float | None:
    return None if text is None else parse_seconds(text, what)
