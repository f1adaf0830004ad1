"""``paceline profile``: shows where the time and memory of a step go."""

import dataclasses
import pathlib
import pkgutil
from typing import TYPE_CHECKING, Annotated, ClassVar, Generic, TypeVar

import tyro

from paceline.benchmarks.config import DataParallelSweep, LayoutSweep, StepSweep
from paceline.cli.output import Flat, OutputOptions, case_progress, say, transfer_progress

if TYPE_CHECKING:
    from paceline.records import Record

_TRACE = "trace.json"
_STORE = "records.jsonl"
_Sweep = TypeVar("_Sweep")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceStepsCommand(Generic[_Sweep]):
    """Trace training steps, and write the trace, the records, and a plot as PNG and SVG."""

    out: pathlib.Path
    """Directory to write to; ranks on several hosts must share it."""
    sweep: Flat[_Sweep]
    output: Flat[OutputOptions]

    function: ClassVar[str]
    """Traces the steps of a sweep into a file. A name, because its module loads torch."""
    plot: ClassVar[str]

    def run(self) -> int:
        """Traces, stores the records, prints tables, and draws the plot if the records allow it."""
        self.out.mkdir(parents=True, exist_ok=True)
        with case_progress(1) as progress:
            trace = pkgutil.resolve_name(self.function)
            records: list[Record] = trace(self.sweep, self.out / _TRACE, progress.step)
        if not records:  # Only rank 0 has records.
            return 0

        from paceline.reports.plots.registry import draw, drawable_plots
        from paceline.reports.plots.style import save_figure

        self.output.tables(list(self.output.keep(records, self.out / _STORE)))
        pictures = []
        if self.plot in drawable_plots(records):
            pictures = save_figure(draw(self.plot, records), self.out, self.plot)
        self.output.show((), *map(str, (self.out / _TRACE, *pictures)))
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileDdpCommand(TraceStepsCommand[DataParallelSweep]):
    """Trace training steps under several strategies, and draw them on one time axis.

    Writes the merged trace of all ranks, the records, and a plot as PNG and SVG.
    """

    sweep: Flat[DataParallelSweep] = dataclasses.field(
        default_factory=lambda: DataParallelSweep(
            strategies=("naive", "flat", "overlapped", "ddp"), rounds=5
        )
    )
    function = "paceline.benchmarks.strategies_profile:trace_data_parallel"
    plot = "timelines"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileLayoutCommand(TraceStepsCommand[LayoutSweep]):
    """Trace steps under several layouts: exposed communication, and pipeline timelines.

    Writes the merged trace of all ranks, the records, and a plot of the pipelines as PNG and SVG.
    """

    sweep: Flat[LayoutSweep] = dataclasses.field(
        default_factory=lambda: LayoutSweep(layouts=("pipeline=2,micro=1",), rounds=5)
    )
    function = "paceline.benchmarks.layouts:trace_layouts"
    plot = "pipelines"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileStepCommand(TraceStepsCommand[StepSweep]):
    """Trace one training step: time by operator, memory by category, and the trace itself."""

    sweep: Flat[StepSweep] = dataclasses.field(
        default_factory=lambda: StepSweep(warmup=(3,), steps=3)
    )
    function = "paceline.benchmarks.step_profile:profile_step"
    plot = "memory-timeline"


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

        # The uncompressed size of a gzipped file is not known in advance.
        is_plain = self.trace.suffix != ".gz" and self.trace.exists()
        size = self.trace.stat().st_size if is_plain else None
        with transfer_progress(self.trace.name) as progress:
            analysis = analyse_trace(self.trace, lambda num_bytes: progress(num_bytes, size))
        if analysis.is_truncated:
            say(f"paceline: {self.trace} is truncated; this is the part that could be read")
        about = (analysis, self.trace.name, capture_environment(devices=[], backends=[]))
        records = [*step_records(*about), *operator_records(*about)]
        self.output.tables(list(self.output.keep(records, None)))
        return 0
