"""``paceline demo``: the whole in a few minutes, on two cores and without a download."""

import dataclasses
import pathlib
import sys

from paceline.cli.output import Flat, OutputOptions, print_json, say, stdout_console
from paceline.core.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoCommand:
    """Train a small model over an emulated network, and see what was predicted of it.

    Text that Python brings along, a calibration, a plan, training on two ranks with a link of 1
    Gbit/s between them, one page, and a sample: in under five minutes on two cores. Every command
    is shown before it is run.
    """

    out: pathlib.Path = pathlib.Path("demo")
    """Directory for everything; demo.html in it is the page to look at."""
    steps: int = 400
    """Training steps."""
    output: Flat[OutputOptions]

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError("--steps must be at least 1")

    def run(self) -> int:
        """Runs the demonstration, and says what came of it."""
        from paceline.core.processes import termination_as_exit
        from paceline.reports.tables.planning.forecasts import outcome_table
        from paceline.workflows.demo import PROMPT, Demo

        if self.out.exists():
            raise UsageError(f"{self.out} is there already; name another directory with --out")
        self.out.mkdir(parents=True, exist_ok=True)
        with termination_as_exit():
            made = Demo(directory=self.out, steps=self.steps, say=say).run()
        if self.output.json:
            print_json(made)
            return 0
        stdout_console().print(
            outcome_table(made.entries, "What was predicted, and what was measured")
        )
        sys.stdout.write(
            f"{PROMPT} → {made.sample}\n\npage: {made.page}\npicture: {made.picture}\n"
        )
        return 0
