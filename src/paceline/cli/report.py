"""``paceline report``: tables, pictures and a whole report from a store."""

import dataclasses
import os
import pathlib
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from paceline.cli.output import (
    DEFAULT_STORE,
    Flat,
    OutputOptions,
    print_json,
    stderr_console,
    stdout_console,
)
from paceline.core.errors import UsageError
from paceline.course.suite.scales import PresetName

if TYPE_CHECKING:
    from paceline.records import Record

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Make tables, pictures and reports from records."""

    form: (
        Annotated[TableCommand, tyro.conf.subcommand("table")]
        | Annotated[PlotCommand, tyro.conf.subcommand("plot")]
        | Annotated[BuildCommand, tyro.conf.subcommand("build")]
    )


def run(command: ReportCommand) -> int:
    """Reads the store and prints, draws or writes."""
    from paceline.records import RecordStore, latest_per_case

    form = command.form
    if isinstance(form, BuildCommand):
        _build(form)
    else:
        records = latest_per_case(RecordStore(form.store).read())
        if isinstance(form, TableCommand):
            _print_table(form, records)
        else:
            _draw_plots(form, records)
    return 0


def _print_table(command: TableCommand, records: "list[Record]") -> None:
    from paceline.reports.evidence.fields import single_kind
    from paceline.reports.tables.table import records_table, render_csv, render_markdown
    from paceline.reports.tables.with_predictions import with_predictions

    every = records
    if command.kind is not None:
        kinds = sorted({record.kind for record in records})
        if command.kind not in kinds:
            found = ", ".join(kinds) or "nothing"
            raise UsageError(f"--kind {command.kind}: the store has {found}")
        records = [record for record in records if record.kind == command.kind]
    single_kind(records)
    if command.output.json:
        for record in records:
            print_json(record)
    elif command.format == "csv":
        sys.stdout.write(render_csv(records))
    else:
        table = records_table(with_predictions(records, every), command.view)
        if command.format == "markdown":
            sys.stdout.write(render_markdown(table))
        else:
            stdout_console().print(table)


def _draw_plots(command: PlotCommand, records: "list[Record]") -> None:
    from paceline.reports.plots.registry import draw, drawable_plots
    from paceline.reports.plots.style import save_figure

    names = command.plot or drawable_plots(records)
    if not names:
        raise UsageError(f"nothing to draw: {command.store} has no measurements")
    for name in names:
        for path in save_figure(draw(name, records), command.out, name):
            if command.output.json:
                print_json({"plot": name, "path": str(path)})
            else:
                sys.stdout.write(f"{path}\n")


def _build(command: BuildCommand) -> None:
    from paceline.course.report import measure_and_write
    from paceline.course.suite.presets import suite_cases
    from paceline.scaling import read_sweep

    runs = command.runs
    if runs is None and _COURSE_DATA in os.environ:
        runs = pathlib.Path(os.environ[_COURSE_DATA])
    if runs is not None:
        read_sweep(runs)  # A file that cannot be read is better known before hours of measuring.
    cases = () if command.preset is None else suite_cases(command.preset, quick=command.quick)
    console = stderr_console()
    paths, num_failed = measure_and_write(
        command.store,
        command.out,
        cases=cases,
        runs=runs,
        say=lambda text: console.print(f"paceline: {text}", markup=False, soft_wrap=True),
    )
    if num_failed:
        console.print(
            f"paceline: failed cases: {num_failed}; the report says why, and "
            "the same command tries again what may yet succeed",
            soft_wrap=True,
        )
    for path in paths:
        if command.output.json:
            print_json({"path": str(path)})
        else:
            sys.stdout.write(f"{path}\n")
