"""``paceline plan calibrate``: calibrates the planner from the user's own measured runs."""

import dataclasses
import pathlib
from typing import Annotated

import tyro

from paceline.cli.output import Flat, OutputOptions, print_json, stdout_console
from paceline.core.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateRowsCommand:
    """Calibrate the planner for a framework and device from your own measured runs.

    Each row is a JSON object with the fields of the published runs: framework, model, device,
    precision, devices, context_length, global_batch, micro_batch, data, measured and unit, and
    every parallel axis that is not 1. Rows of several frameworks give several calibrations.
    """

    rows: Annotated[pathlib.Path, tyro.conf.Positional]
    """JSON Lines file of measured runs."""
    with_published: bool = False
    """Also fit the published runs of the same framework; a few runs of your own are then enough."""
    out: pathlib.Path | None = None
    """JSON Lines file to write the calibrations to, for plan search --calibration."""
    output: Flat[OutputOptions]

    def __post_init__(self) -> None:
        if self.out is not None and self.out.suffix != ".jsonl":
            raise UsageError(f"--out {self.out}: give a name that ends in .jsonl")

    def run(self) -> int:
        """Fits the rows, holds out each model in turn, and prints constants and errors."""
        from paceline.planner.calibrations.build import build_calibrations
        from paceline.planner.calibrations.cases import Case, predictable
        from paceline.planner.calibrations.store import write_calibrations
        from paceline.planner.published.reader import published_runs, read_rows
        from paceline.reports.tables.planning.calibrations import calibrations_table

        own = predictable(read_rows(self.rows))
        pools: dict[str, list[Case]] = {}
        for case in own:
            pools.setdefault(case.pool, []).append(case)
        if not pools:
            raise UsageError(
                f"{self.rows}: no row can be predicted; each needs model, devices, data, "
                "context_length, global_batch, and s/iteration or tokens/s/device"
            )
        if self.with_published:
            for case in predictable(published_runs()):
                if case.pool in pools:
                    pools[case.pool].append(case)
        made = [each for cases in pools.values() for each in build_calibrations(cases)]
        if self.out is not None:
            write_calibrations(made, self.out)
        if self.output.json:
            for each in made:
                print_json({"name": each.name, "rows": len(each.rows), **each.constants})
        else:
            stdout_console().print(calibrations_table(made))
        return 0
