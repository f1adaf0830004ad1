"""``paceline report``: tables, pictures and a whole report from a store; a page of a run."""

import dataclasses
import os
import pathlib
import sys
from typing import Annotated, Literal

import tyro

from paceline.cli.output import DEFAULT_STORE, Flat, OutputOptions, print_json, say, stdout_console
from paceline.core.errors import UsageError
from paceline.course.suite.scales import PresetName

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
    """Kind of record to show; needed when the store holds several."""
    view: Literal["time", "memory"] = "time"
    """What rich and markdown show of a step: times and rates, or memory at three points."""
    format: Literal["rich", "markdown", "csv"] = "rich"
    """rich is for a terminal; with --json this is not used."""
    store: pathlib.Path = DEFAULT_STORE
    """JSON Lines file to read the records from."""
    output: Flat[OutputOptions]

    def run(self) -> int:
        """Prints the table."""
        from paceline.records import RecordStore, latest_per_case
        from paceline.reports.evidence.fields import single_kind
        from paceline.reports.tables.table import records_table, render_csv, render_markdown
        from paceline.reports.tables.with_predictions import with_predictions

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
    """Draw the newest record of each case, as PNG and SVG."""

    out: pathlib.Path
    """Directory for the pictures."""
    plot: tuple[PlotName, ...] = ()
    """Which pictures; by default all that the records allow."""
    store: pathlib.Path = DEFAULT_STORE
    """JSON Lines file to read the records from."""
    output: Flat[OutputOptions]

    def run(self) -> int:
        """Draws the pictures and prints their paths."""
        from paceline.records import RecordStore, latest_per_case
        from paceline.reports.plots.registry import draw, drawable_plots
        from paceline.reports.plots.style import save_figure

        records = latest_per_case(RecordStore(self.store).read())
        names = self.plot or drawable_plots(records)
        if not names:
            raise UsageError(f"nothing to draw: {self.store} has no measurements")
        for name in names:
            for path in save_figure(draw(name, records), self.out, name):
                if self.output.json:
                    print_json({"plot": name, "path": str(path)})
                else:
                    sys.stdout.write(f"{path}\n")
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildCommand:
    """Answer every question of the courses from records, in one page; measure what is missing.

    Writes report.html, which needs nothing else, and report.md with its pictures.
    """

    out: pathlib.Path = pathlib.Path("report")
    """Directory for the report, and for what the commands of a preset print."""
    preset: PresetName | None = None
    """Measure what the store lacks for this kind of machine, and append it; by default nothing is
    measured."""
    quick: bool = False
    """Smaller models, fewer sizes and fewer samples."""
    runs: pathlib.Path | None = None
    """Training runs for the scaling-law question; by default what PACELINE_COURSE_DATA names, and
    without it runs that are made up."""
    store: pathlib.Path = DEFAULT_STORE
    """JSON Lines file to read the records from."""
    output: Flat[OutputOptions]

    def __post_init__(self) -> None:
        if self.quick and self.preset is None:
            raise UsageError("--quick is about what a preset measures; give --preset as well")

    def run(self) -> int:
        """Writes the report and prints its paths."""
        from paceline.course.report import write_report
        from paceline.course.suite.presets import suite_cases
        from paceline.records import RecordStore
        from paceline.scaling import read_sweep
        from paceline.workflows.suite import Suite

        runs = self.runs
        if runs is None and _COURSE_DATA in os.environ:
            runs = pathlib.Path(os.environ[_COURSE_DATA])
        if runs is not None:
            read_sweep(runs)  # A file that cannot be read is better known before measuring.
        store = RecordStore(self.store)
        if self.preset is not None:
            cases = suite_cases(self.preset, quick=self.quick)
            suite = Suite(cases=cases, store=store, workspace=self.out / "suite")
            if num_failed := suite.run(lambda text: say(f"paceline: {text}")):
                say(
                    f"paceline: failed cases: {num_failed}; the report says why, and "
                    "the same command tries again what may yet succeed"
                )
        for path in write_report(list(store.read()), self.out, runs):
            if self.output.json:
                print_json({"path": str(path)})
            else:
                sys.stdout.write(f"{path}\n")
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCommand:
    """Make a page of a training run: losses, speed, time by phase, memory, events.

    The page needs nothing else, and the run may be going on.
    """

    run_directory: Annotated[
        pathlib.Path, tyro.conf.Positional, tyro.conf.arg(name="run", metavar="DIR")
    ]
    """Directory of the run: out in its config."""
    out: pathlib.Path | None = None
    """The page; by default report.html in that directory."""
    output: Flat[OutputOptions]

    def run(self) -> int:
        """Writes the page and prints its path."""
        from paceline.reports.document.training_run import write_run_page

        page = self.run_directory / "report.html" if self.out is None else self.out
        write_run_page(self.run_directory, page)
        if self.output.json:
            print_json({"path": str(page)})
        else:
            sys.stdout.write(f"{page}\n")
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Make tables, pictures and reports from records, and a page of a training run."""

    form: (
        Annotated[TableCommand, tyro.conf.subcommand("table")]
        | Annotated[PlotCommand, tyro.conf.subcommand("plot")]
        | Annotated[BuildCommand, tyro.conf.subcommand("build")]
        | Annotated[RunCommand, tyro.conf.subcommand("run")]
    )

    def run(self) -> int:
        """Reads the store and prints, draws or writes."""
        return self.form.run()
