"""``paceline compare``: finds regressions in time and memory between two stores."""

import dataclasses
import pathlib
from typing import Annotated

import tyro

from paceline.cli.output import Flat, OutputOptions, print_json, stdout_console
from paceline.core.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """Compare two stores of the same cases; the exit code is 1 if anything got worse.

    Compares the times and bytes of every case that is in both stores. A change counts if it
    exceeds --tolerance and the spread of the samples, so you can use this command as a CI gate.
    """

    before: Annotated[pathlib.Path, tyro.conf.Positional]
    """Baseline store, such as main.jsonl."""
    after: Annotated[pathlib.Path, tyro.conf.Positional]
    """Store to compare with the baseline."""
    tolerance: float = 0.05
    """Relative growth of a median that is tolerated."""
    output: Flat[OutputOptions]

    def __post_init__(self) -> None:
        if not self.tolerance >= 0:
            raise UsageError(f"--tolerance is {self.tolerance:g}; it must not be negative")

    def run(self) -> int:
        """Prints all changes, the worst first; returns 1 if anything got worse."""
        from paceline.records import RecordStore
        from paceline.reports.comparison import compare_stores

        before, after = (list(RecordStore(path).read()) for path in (self.before, self.after))
        found = compare_stores(before, after, self.tolerance)
        if not found.changes:
            raise UsageError(
                f"{self.before} and {self.after} have no case in common with times or bytes; "
                "run the same measurement into both stores"
            )
        if self.output.json:
            for change in found.changes:
                print_json(change)
        else:
            from paceline.reports.tables.measurements import regression_table

            stdout_console().print(regression_table(found, self.tolerance))
        return 1 if found.worse else 0
