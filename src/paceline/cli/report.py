"""``paceline report`` and ``paceline compare``: tables, plots, reports and regressions."""

import dataclasses
import os
import pathlib
from typing import Annotated, Literal

import tyro

from paceline.cli.output import DEFAULT_STORE, Flat, OutputOptions, ReadStore, say, work_progress
from paceline.core.errors import UsageError
from paceline.course import PresetName

_COURSE_DATA = "PACELINE_COURSE_DATA"

PlotName = Literal[
    "step-time",
    "warmup",
    "precision",
    "attention-time",
    "attention-memory",
    "communication",
    "strategies",
    "bucket-size",
    "optimizer-memory",
    "memory-timeline",
    "timelines",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableCommand:
    """Print the newest record of each case as a table."""

    kind: str | None = None
    """Kind of record to show; required if the store has several kinds."""
    view: Literal["time", "memory"] = "time"
    """Columns of a step in rich and markdown: times and rates, or memory at three points."""
    format: Literal["rich", "markdown", "csv"] = "rich"
    """Format of the table; rich is for a terminal. Not used with --json."""
    store: ReadStore = DEFAULT_STORE
    output: Flat[OutputOptions]

    def run(self) -> int:
        """Prints the table."""
        from paceline.records import RecordStore, latest_per_case
        from paceline.reports.fields import single_kind
        from paceline.reports.tables.predictions import with_predictions
        from paceline.reports.tables.table import records_table, render_csv, render_markdown

        records = every = latest_per_case(RecordStore(self.store).read())
        if self.kind is not None:
            kinds = sorted({record.kind for record in records})
            if self.kind not in kinds:
                found = ", ".join(kinds) or "nothing"
                raise UsageError(f"--kind {self.kind}: the store has {found}")
            records = [record for record in records if record.kind == self.kind]
        single_kind(records)
        if self.output.json:  # A kind may have records without having a table.
            self.output.show(records)
            return 0
        table = records_table(with_predictions(records, every), self.view)
        if self.format == "rich":
            self.output.show((), table)
        else:
            text = render_csv(records) if self.format == "csv" else render_markdown(table)
            self.output.show((), text.rstrip("\n"))
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlotCommand:
    """Plot the newest record of each case, as PNG and SVG."""

    out: pathlib.Path
    """Directory for the plots."""
    plot: tuple[PlotName, ...] = ()
    """Plots to draw; by default, every plot that the store has records for."""
    store: ReadStore = DEFAULT_STORE
    output: Flat[OutputOptions]

    def run(self) -> int:
        """Draws the plots and prints their paths."""
        from paceline.records import RecordStore, latest_per_case
        from paceline.reports.plots.registry import draw, drawable_plots
        from paceline.reports.plots.style import save_figure

        records = latest_per_case(RecordStore(self.store).read())
        names = self.plot or drawable_plots(records)
        if not names:
            raise UsageError(f"nothing to draw: {self.store} has no measurements")
        for name in names:
            for path in save_figure(draw(name, records), self.out, name):
                self.output.show([{"plot": name, "path": str(path)}], str(path))
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildCommand:
    """Write a report that answers every question of the courses from records.

    Writes report.html, which is self-contained, and report.md with its figures. With --preset, it
    first measures what the store lacks.
    """

    out: pathlib.Path = pathlib.Path("report")
    """Directory for the report, and for the output of the commands that a preset runs."""
    preset: PresetName | None = None
    """Kind of machine: first run its measurements that the store lacks, and append them. By
    default, nothing is measured."""
    quick: bool = False
    """Measure smaller models, fewer sizes and fewer samples."""
    runs: pathlib.Path | None = None
    """File of training runs for the scaling-law question; by default the file that
    PACELINE_COURSE_DATA names, or else synthetic runs."""
    store: ReadStore = DEFAULT_STORE
    output: Flat[OutputOptions]

    def __post_init__(self) -> None:
        if self.quick and self.preset is None:
            raise UsageError("--quick shortens the measurements of a preset; give --preset as well")

    def run(self) -> int:
        """Writes the report and prints its paths."""
        from paceline.course.presets import suite_cases
        from paceline.course.report import write_report
        from paceline.course.suite import Suite
        from paceline.records import RecordStore
        from paceline.scaling import read_sweep

        runs = self.runs
        if runs is None and _COURSE_DATA in os.environ:
            runs = pathlib.Path(os.environ[_COURSE_DATA])
        if runs is not None:
            read_sweep(runs)  # Fail on an unreadable file before measuring.
        store = RecordStore(self.store)
        if self.preset is not None:
            cases = suite_cases(self.preset, quick=self.quick)
            suite = Suite(cases=cases, store=store, workspace=self.out / "suite")
            if num_failed := suite.run(lambda text: say(f"paceline: {text}")):
                say(
                    f"paceline: failed cases: {num_failed}; the report says why, and "
                    "the same command retries those that may still succeed"
                )
        with work_progress("writing the report"):
            paths = write_report(list(store.read()), self.out, runs)
        for path in paths:
            self.output.show([{"path": str(path)}], str(path))
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCommand:
    """Write an HTML report of a training run: losses, speed, time by phase, memory, events.

    The file is self-contained. The run may still be training.
    """

    run_directory: Annotated[
        pathlib.Path, tyro.conf.Positional, tyro.conf.arg(name="run", metavar="DIR")
    ]
    """Directory of the run, named by out in its config."""
    out: pathlib.Path | None = None
    """File to write; by default, report.html in the directory of the run."""
    output: Flat[OutputOptions]

    def run(self) -> int:
        """Writes the report and prints its path."""
        from paceline.reports.run_page import write_run_page

        page = self.run_directory / "report.html" if self.out is None else self.out
        with work_progress("writing the report"):
            write_run_page(self.run_directory, page)
        self.output.show([{"path": str(page)}], str(page))
        return 0


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
        from paceline.reports.tables.measurements import regression_table

        before, after = (list(RecordStore(path).read()) for path in (self.before, self.after))
        found = compare_stores(before, after, self.tolerance)
        if not found.changes:
            raise UsageError(
                f"{self.before} and {self.after} have no case in common with times or bytes; "
                "run the same measurement into both stores"
            )
        self.output.show(found.changes, regression_table(found, self.tolerance))
        return 1 if found.worse else 0
