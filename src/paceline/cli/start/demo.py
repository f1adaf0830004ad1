"""``paceline demo``: an end-to-end demo in a few minutes, on two cores and without downloads."""

import dataclasses
import pathlib
import sys

from paceline.cli.output import Flat, OutputOptions, print_json, say, stdout_console
from paceline.core.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoCommand:
    """Train a small model over an emulated network, and compare it with its prediction.

    Prepares the text of Python's manual, calibrates this machine, plans, trains on two ranks with
    a 1 Gbit/s link between them, writes an HTML page and generates a sample, in under five minutes
    on two cores. Shows every command before running it.
    """

    out: pathlib.Path = pathlib.Path("demo")
    """Directory for all files; demo.html in it is the page to open."""
    steps: int = 400
    """Training steps."""
    output: Flat[OutputOptions]

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError("--steps must be at least 1")

    def run(self) -> int:
        """Runs the demo and prints its results."""
        from paceline.core.processes import termination_as_exit
        from paceline.reports.tables.planning.forecasts import outcome_table
        from paceline.workflows.demo import PROMPT, Demo

        if self.out.exists():
            raise UsageError(f"{self.out} already exists; name another directory with --out")
        self.out.mkdir(parents=True, exist_ok=True)
        with termination_as_exit():
            made = Demo(directory=self.out, steps=self.steps, say=say).run()
        if self.output.json:
            print_json(made)
            return 0
        stdout_console().print(outcome_table(made.entries, "Predicted and measured"))
        sys.stdout.write(
            f"{PROMPT} → {made.sample}\n\npage: {made.page}\npicture: {made.picture}\n"
        )
        return 0
