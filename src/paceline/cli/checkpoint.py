"""``paceline checkpoint``: which checkpoints there are, and whether they are intact."""

import dataclasses
import sys
from typing import Annotated

import tyro

from paceline.cli.output import OutputOptions, print_json, stdout_console, transfer_progress

_Place = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR|s3://...")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListCommand:
    """List the checkpoints of a run, the oldest first."""

    place: _Place
    """Where the run saves its checkpoints."""
    output: OutputOptions

    def run(self) -> int:
        """Prints one line per checkpoint."""
        from paceline.training.checkpoint.verify import list_checkpoints

        found = list_checkpoints(self.place)
        if self.output.json:
            for summary in found:
                print_json(summary)
            return 0
        if not found:
            sys.stdout.write(f"{self.place}: no checkpoints\n")
            return 0
        from rich.table import Table

        table = Table("step", "size", "files", "tensors", "ranks", "state")
        for summary in found:
            table.add_row(
                f"{summary.step:,}",
                f"{summary.num_bytes / 1e6:,.1f} MB",
                f"{summary.num_files:,}",
                f"{summary.num_tensors:,}",
                f"{summary.world_size:,}",
                summary.problem or "complete",
            )
        stdout_console().print(table)
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyCommand:
    """Read checkpoints whole and compare them with the digests of their manifests."""

    place: _Place
    """Where the run saves its checkpoints."""
    step: int | None = None
    """The checkpoint of this step only; all of them otherwise."""
    output: OutputOptions

    def run(self) -> int:
        """Prints what is wrong; exits with 1 if anything is."""
        from paceline.training.checkpoint.errors import CheckpointError
        from paceline.training.checkpoint.places import open_place
        from paceline.training.checkpoint.verify import verify_checkpoint

        steps = sorted(open_place(self.place).steps()) if self.step is None else [self.step]
        if not steps:
            raise CheckpointError(
                f"{self.place}: no checkpoints to verify; name the place that a run saves to"
            )
        num_wrong = 0
        for step in steps:
            with transfer_progress(f"step {step}") as progress:
                for finding in verify_checkpoint(self.place, step, progress):
                    num_wrong += 1
                    if self.output.json:
                        print_json(finding)
                    else:
                        sys.stdout.write(f"{finding}\n")
        if not num_wrong and not self.output.json:
            what = "checkpoint is" if len(steps) == 1 else "checkpoints are"
            sys.stdout.write(f"{self.place}: {len(steps):,} {what} intact\n")
        return 1 if num_wrong else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointCommand:
    """Checkpoints of training runs: list them, verify them."""

    task: (
        Annotated[ListCommand, tyro.conf.subcommand("list")]
        | Annotated[VerifyCommand, tyro.conf.subcommand("verify")]
    )

    def run(self) -> int:
        """Lists or verifies."""
        return self.task.run()
