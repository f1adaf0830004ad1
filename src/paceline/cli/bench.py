"""``paceline bench``: measures, appends to the store, and prints."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Generic, TypeAlias, TypeVar

import tyro

from paceline.benchmarks.config import (
    AttentionSweep,
    CollectiveSweep,
    DataParallelSweep,
    KernelSweep,
    LayoutSweep,
    OptimizerSweep,
    StepSweep,
)
from paceline.cli.output import (
    DEFAULT_STORE,
    Flat,
    OutputOptions,
    case_progress,
    keep_records,
    print_tables,
)
from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from paceline.records import Record

Sweep: TypeAlias = (
    StepSweep
    | AttentionSweep
    | CollectiveSweep
    | DataParallelSweep
    | LayoutSweep
    | OptimizerSweep
    | KernelSweep
)
_Sweep = TypeVar("_Sweep", bound=Sweep)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepCommand(Generic[_Sweep]):
    """Measure every case of a sweep."""

    sweep: Flat[_Sweep]
    store: pathlib.Path = DEFAULT_STORE
    """JSON Lines file to append the records to."""
    output: Flat[OutputOptions]

    def run(self) -> int:
        """Measures every case; returns 1 if one failed for a reason other than its size."""
        num_cases = _num_cases(self.sweep)
        if num_cases == 0:
            raise UsageError(
                "nothing to measure: every flag that takes a list needs at least one value"
            )

        from paceline.records.kinds import PREDICTION

        records: list[Record] = []
        with case_progress(num_cases) as progress:
            made = _records(self.sweep, progress.step)
            for record in keep_records(made, self.store, self.output):
                records.append(record)
                if record.kind != PREDICTION:
                    progress.next_case()
        records += keep_records(self.predictions(records), self.store, self.output)
        print_tables(records, self.output)
        return 1 if any(record.outcome in ("failed", "timeout") for record in records) else 0

    def predictions(self, records: "list[Record]") -> "Iterator[Record]":
        """Yields predictions for the measured cases, if the subject has a model of them."""
        yield from ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutCommand(SweepCommand[LayoutSweep]):
    """Measure every layout, next to the planner's prediction."""

    calibration: pathlib.Path | None = None
    """Records of paceline calibrate on as many ranks; adds the planner's predictions."""

    def predictions(self, records: "list[Record]") -> "Iterator[Record]":
        """Yields the planner's predictions if a calibration is given."""
        if self.calibration is not None:
            from paceline.benchmarks.layout_predictions import layout_predictions
            from paceline.records import RecordStore

            yield from layout_predictions(records, RecordStore(self.calibration).read())


def _subcommand(name: str, sweep: type[Sweep]) -> object:
    return tyro.conf.subcommand(name, description=sweep.__doc__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchCommand:
    """Measure one part of training and append the records to a store."""

    subject: (
        Annotated[SweepCommand[StepSweep], _subcommand("step", StepSweep)]
        | Annotated[SweepCommand[AttentionSweep], _subcommand("attention", AttentionSweep)]
        | Annotated[SweepCommand[CollectiveSweep], _subcommand("comm", CollectiveSweep)]
        | Annotated[SweepCommand[DataParallelSweep], _subcommand("ddp", DataParallelSweep)]
        | Annotated[LayoutCommand, _subcommand("layout", LayoutSweep)]
        | Annotated[SweepCommand[OptimizerSweep], _subcommand("memory", OptimizerSweep)]
        | Annotated[SweepCommand[KernelSweep], _subcommand("kernels", KernelSweep)]
    )

    def run(self) -> int:
        """Measures the subject."""
        return self.subject.run()


def _num_cases(sweep: Sweep) -> int:
    if isinstance(sweep, LayoutSweep):
        return sum(len(case.layouts) for case in sweep.cases())
    if isinstance(sweep, DataParallelSweep):
        return sum(len(case.variants) for case in sweep.cases())
    return len(list(sweep.cases()))


def _records(sweep: Sweep, on_progress: Callable[[int, int], None]) -> "Iterator[Record]":
    match sweep:
        case StepSweep():
            from paceline.benchmarks.step import step_records

            return step_records(sweep, on_progress)
        case AttentionSweep():
            from paceline.benchmarks.attention import attention_records

            return attention_records(sweep, on_progress)
        case CollectiveSweep():
            from paceline.benchmarks.collectives import collective_records

            return collective_records(sweep)
        case DataParallelSweep():
            import logging

            from paceline.benchmarks.strategies import data_parallel_records

            # Enable only the benchmarks' messages: under a launcher, the container on this rank
            # logs the same ones.
            logging.basicConfig(format="paceline: %(message)s")
            logging.getLogger("paceline.benchmarks").setLevel(logging.INFO)
            return data_parallel_records(sweep, on_progress)
        case LayoutSweep():
            from paceline.benchmarks.layouts import layout_records

            return layout_records(sweep, on_progress)
        case OptimizerSweep():
            from paceline.benchmarks.optimizer_memory import optimizer_records

            return optimizer_records(sweep)
        case KernelSweep():
            from paceline.benchmarks.kernels import kernel_records

            return kernel_records(sweep, on_progress)
