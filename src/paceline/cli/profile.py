"""``paceline profile``: shows where the time and memory of a step go."""

import dataclasses
import pathlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from paceline.benchmarks.config import DataParallelSweep, LayoutSweep, StepSweep
from paceline.cli.output import (
    Flat,
    OutputOptions,
    byte_progress,
    case_progress,
    keep_records,
    print_tables,
    say,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.units import Progress
    from paceline.records import Record

_TRACE = "trace.json"
_STORE = "records.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileDdpCommand:
    """Trace training steps under several strategies, and draw them on one time axis.

    Writes the merged trace of all ranks, the records, and a plot as PNG and SVG.
    """

    out: pathlib.Path
    """Directory to write to; ranks on several hosts must share it."""
    sweep: Flat[DataParallelSweep] = dataclasses.field(
        default_factory=lambda: DataParallelSweep(
            strategies=("naive", "flat", "overlapped", "ddp"), rounds=5
        )
    )
    output: Flat[OutputOptions]

    def run(self) -> int:
        """Traces steps, stores the records, draws and prints."""
        from paceline.benchmarks.strategies_profile import trace_data_parallel

        return _trace(self, trace_data_parallel, "timelines")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileLayoutCommand:
    """Trace steps under several layouts: exposed communication, and pipeline timelines.

    Writes the merged trace of all ranks, the records, and a plot of the pipelines as PNG and SVG.
    """

    out: pathlib.Path
    """Directory to write to; ranks on several hosts must share it."""
    sweep: Flat[LayoutSweep] = dataclasses.field(
        default_factory=lambda: LayoutSweep(layouts=("pipeline=2,micro=1",), rounds=5)
    )
    output: Flat[OutputOptions]

    def run(self) -> int:
        """Traces steps, stores the records, draws and prints."""
        from paceline.benchmarks.layouts import trace_layouts

        return _trace(self, trace_layouts, "pipelines")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileStepCommand:
    """Trace one training step: time by operator, memory by category, and the trace itself."""

    out: pathlib.Path
    """Directory to write to."""
    sweep: Flat[StepSweep] = dataclasses.field(
        default_factory=lambda: StepSweep(warmup=(3,), steps=3)
    )
    output: Flat[OutputOptions]

    def run(self) -> int:
        """Traces steps, stores the records, draws and prints."""
        from paceline.benchmarks.step_profile import profile_step

        return _trace(self, profile_step, "memory-timeline")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceCommand:
    """Show where the time of a Chrome trace goes; the trace is from Paceline or from torch."""

    trace: Annotated[pathlib.Path, tyro.conf.Positional]
    """Trace file, plain or compressed with gzip."""
    output: Flat[OutputOptions]

    def run(self) -> int:
        """Analyses the trace and prints tables."""
        from paceline.records.environment import capture_environment
        from paceline.traces.analysis import analyse_trace, operator_records, step_records

        with byte_progress(self.trace) as advance:
            analysis = analyse_trace(self.trace, advance)
        if analysis.is_truncated:
            say(f"paceline: {self.trace} is truncated; this is the part that could be read")
        about = (analysis, self.trace.name, capture_environment(devices=[], backends=[]))
        records = [*step_records(*about), *operator_records(*about)]
        print_tables(list(keep_records(records, None, self.output)), self.output)
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileCommand:
    """Show where the time and memory of a step go, on any machine."""

    subject: (
        Annotated[ProfileDdpCommand, tyro.conf.subcommand("ddp")]
        | Annotated[ProfileLayoutCommand, tyro.conf.subcommand("layout")]
        | Annotated[ProfileStepCommand, tyro.conf.subcommand("step")]
        | Annotated[TraceCommand, tyro.conf.subcommand("trace")]
    )

    def run(self) -> int:
        """Records a trace, or analyses an existing one."""
        return self.subject.run()


def _trace(
    command: ProfileDdpCommand | ProfileLayoutCommand | ProfileStepCommand,
    trace: "Callable[[Any, pathlib.Path, Progress], list[Record]]",
    plot: str,
) -> int:
    """Traces, stores the records, prints tables, and draws the plot if the records allow it."""
    command.out.mkdir(parents=True, exist_ok=True)
    with case_progress(1) as progress:
        records = trace(command.sweep, command.out / _TRACE, progress.step)
    if not records:  # Only rank 0 has records.
        return 0

    from paceline.reports.plots.registry import draw, drawable_plots
    from paceline.reports.plots.style import save_figure

    print_tables(list(keep_records(records, command.out / _STORE, command.output)), command.output)
    pictures = []
    if plot in drawable_plots(records):
        pictures = save_figure(draw(plot, records), command.out, plot)
    if not command.output.json:
        sys.stdout.writelines(f"{path}\n" for path in (command.out / _TRACE, *pictures))
    return 0
