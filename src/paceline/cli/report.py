"""``paceline report``: tables and pictures from a store."""

import dataclasses
import pathlib
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import tyro

from paceline.cli.bench import StoreOptions
from paceline.cli.output import OutputOptions, print_record, stdout_console
from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from paceline.records import Record

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
    store: StoreOptions
    output: OutputOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlotCommand:
    """Draw the newest record of each case, as PNG and SVG."""

    out: pathlib.Path
    """Directory for the pictures."""
    plot: tuple[PlotName, ...] = ()
    """Which pictures; by default all that the records allow."""
    store: StoreOptions
    output: OutputOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Make tables and pictures from records; measures nothing."""

    form: (
        Annotated[TableCommand, tyro.conf.subcommand("table")]
        | Annotated[PlotCommand, tyro.conf.subcommand("plot")]
    )


def run(command: ReportCommand) -> int:
    """Reads the store and prints or draws."""
    from paceline.records import RecordStore, latest_per_case

    form = command.form
    records = latest_per_case(RecordStore(form.store.store).read())
    if isinstance(form, TableCommand):
        _print_table(form, records)
    else:
        _draw_plots(form, records)
    return 0


def _print_table(command: TableCommand, records: "list[Record]") -> None:
    from paceline.reports.predictions import with_predictions
    from paceline.reports.selection import single_kind
    from paceline.reports.tables import records_table, render_csv, render_markdown, render_rich

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
            print_record(record)
    elif command.format == "csv":
        sys.stdout.write(render_csv(records))
    else:
        table = records_table(with_predictions(records, every), command.view)
        if command.format == "markdown":
            sys.stdout.write(render_markdown(table))
        else:
            stdout_console().print(render_rich(table))


def _draw_plots(command: PlotCommand, records: "list[Record]") -> None:
    from paceline.reports.figures import save_figure
    from paceline.reports.plots import draw, drawable_plots

    names = command.plot or drawable_plots(records)
    if not names:
        raise UsageError(f"nothing to draw: {command.store.store} has no measurements")
    for name in names:
        for path in save_figure(draw(name, records), command.out, name):
            if command.output.json:
                entry = {"plot": name, "path": str(path)}
                sys.stdout.write(msgspec.json.encode(entry).decode() + "\n")
            else:
                sys.stdout.write(f"{path}\n")
