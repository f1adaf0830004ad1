"""``paceline report``: tables, plots and reports from a store, and a report of one run."""

import dataclasses
import os
import pathlib
import sys
from typing import Annotated, Literal

import tyro

from paceline.cli.output import (
    DEFAULT_STORE,
    Flat,
    OutputOptions,
    ReadStore,
    print_json,
    print_result,
    say,
    stdout_console,
    work_progress,
)
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
        if self.output.json:
            for record in records:
                print_json(record)
        elif self.format == "csv":
            sys.stdout.write(render_csv(records))
        else:
            table = records_table(with_predictions(records, every), self.view)
            if self.format == "markdown":
                sys.stdout.write(render_markdown(table))
            else:
                stdout_console().print(table)
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
                print_result({"plot": name, "path": str(path)}, str(path), self.output)
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
            print_result({"path": str(path)}, str(path), self.output)
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
        print_result({"path": str(page)}, str(page), self.output)
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Make tables, plots and reports from records, and an HTML report of a training run."""

    form: (
        Annotated[TableCommand, tyro.conf.subcommand("table")]
        | Annotated[PlotCommand, tyro.conf.subcommand("plot")]
        | Annotated[BuildCommand, tyro.conf.subcommand("build")]
        | Annotated[RunCommand, tyro.conf.subcommand("run")]
    )

    def run(self) -> int:
        """Runs the chosen subcommand."""
        return self.form.run()
