"""``paceline plan goodput``: simulates the goodput of long runs when devices fail."""

import dataclasses
import pathlib
from typing import Literal

from paceline.cli.output import (
    Flat,
    OutputOptions,
    case_progress,
    keep_records,
    require_figure,
    stdout_console,
)
from paceline.core.errors import UsageError
from paceline.core.units import parse_rate, parse_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoodputCommand:
    """Simulate failures in long runs: restarts or replicas, spare hosts, kinds of checkpoints.

    Devices fail as often as in the training of Llama 3. Times are those of large
    clusters or those measured on a small machine; flags override them.
    """

    devices: tuple[int, ...] = (1_024, 16_384, 100_000)
    """Numbers of devices to simulate."""
    constants: Literal["cluster", "measured"] = "cluster"
    """Where times come from: reports of large runs, or Paceline measured on a small machine."""
    detection: str | None = None
    """Time from a failure until the job is stopped, such as 30s."""
    restart: str | None = None
    """Time to start all ranks, such as 5min; the rendezvous comes on top."""
    disk_bandwidth: str | None = None
    """Disk bandwidth of one device when all devices write, such as 122MB/s."""
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
        if not self.devices or min(self.devices) < 1:
            raise UsageError("--devices must be at least 1")
        if self.trials < 1:
            raise UsageError("--trials must be positive")
        if self.figure is not None and self.replay:
            raise UsageError(
                "--figure plots goodput over devices, which --replay does not vary; leave one out"
            )
        require_figure(self.figure)

    def run(self) -> int:
        """Simulates runs and prints tables with the assumptions."""
        return self._replay() if self.replay else self._simulate()

    def _simulate(self) -> int:
        from paceline.planner.goodput.options import ASSUMPTIONS, CONSTANTS, options
        from paceline.planner.goodput.simulate import option_records
        from paceline.records import capture_environment
        from paceline.reports.tables.reliability import gains_table, goodput_table

        changes = self._changes()
        constants = dataclasses.replace(CONSTANTS[self.constants], **changes)
        chosen = list(options(self.devices, constants))
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
        changes = {}
        if self.detection is not None:
            changes["detection_s"] = parse_seconds(self.detection, "detection")
        if self.restart is not None:
            changes["restart_s"] = parse_seconds(self.restart, "restart")
        if self.disk_bandwidth is not None:
            changes["disk_bytes_per_s"] = parse_rate(self.disk_bandwidth) / 8
        return changes
