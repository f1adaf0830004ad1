"""Configuration of a chaos run: the command, its faults and the time limits."""

import dataclasses
import pathlib
from collections.abc import Mapping

from paceline.core.errors import UsageError
from paceline.lab.chaos.schedule import LINK_FAULTS, FaultKind, Kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    """A run, its faults, and the limits of both."""

    command: tuple[str, ...]
    run: pathlib.Path
    """Directory of the run, `out` of its config."""
    kinds: Mapping[FaultKind, Kind]
    for_s: float
    """How long to inject faults; the run is then left to finish."""
    finish_within_s: float = 600.0
    """Time that the run may take to finish after the faults."""
    recover_within_s: float = 120.0
    """Time for the next step after a fault; a fault without a next step counts as lost."""
    steps_between: int = 10
    """Steps that the run must complete after a fault before the next one is injected."""
    seed: int = 0
    any_process: bool = False
    """Whether launchers and helper processes are also killed and stopped, not only ranks."""
    restart: bool = True
    """Whether the command is restarted when it fails."""
    num_hosts: int = 0
    """Hosts of the lab, with one rank each; 0 to run on this machine, where no link can fail."""
    disk_bytes: int = 0
    """Size of the disk that is mounted for the run; 0 for none."""
    reference: pathlib.Path | None = None
    """Directory of an undisturbed run, whose losses must be bit-identical to those of this run."""

    def __post_init__(self) -> None:
        if not self.command:
            raise UsageError("nothing to run: put the command after --")
        if not self.kinds:
            raise UsageError("no fault to inject; ask for at least one, such as --kill-every 30s")
        if not (self.for_s > 0 and self.finish_within_s > 0 and self.recover_within_s > 0):
            raise UsageError("--for, --finish-within and --recover-within must be positive")
        if self.steps_between < 1:
            raise UsageError("--steps-between must be at least 1")
        if self.num_hosts < 2 and any(kind in self.kinds for kind in LINK_FAULTS):
            raise UsageError("link faults need links between virtual hosts; add --hosts 2")
