"""``paceline bench`` and ``paceline calibrate``: measure, append to the store, and print."""

import dataclasses
import logging
import pathlib
import pkgutil
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from paceline.benchmarks.config import (
    AttentionSweep,
    CalibrationSweep,
    CollectiveSweep,
    DataParallelSweep,
    KernelSweep,
    LayoutSweep,
    OptimizerSweep,
    StepSweep,
)
from paceline.cli.output import DEFAULT_STORE, AppendedStore, Flat, OutputOptions, case_progress
from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from paceline.records import Record

_Sweep = TypeVar("_Sweep")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepCommand(Generic[_Sweep]):
    """Measure every case of a sweep."""

    sweep: Flat[_Sweep]
    store: AppendedStore = DEFAULT_STORE
    output: Flat[OutputOptions]

    def run(self) -> int:
        """Measures every case; returns 1 if one failed for a reason other than its size."""
        num_cases = _num_cases(self.sweep)
        if num_cases == 0:
            raise UsageError(
                "nothing to measure: every flag that takes a list needs at least one value"
            )

        from paceline.records.kinds import PREDICTION

        # Enable only the benchmarks' messages, such as how automatic bucket sizes were chosen:
        # under a launcher, the container on this rank logs the same ones.
        logging.basicConfig(format="paceline: %(message)s")
        logging.getLogger("paceline.benchmarks").setLevel(logging.INFO)
        records: list[Record] = []
        with case_progress(num_cases) as progress:
            for record in self.output.keep(self._measure(progress.step), self.store):
                records.append(record)
                if record.kind != PREDICTION:
                    progress.next_case()
        records += self.output.keep(self.predictions(records), self.store)
        self.output.tables(records)
        return 1 if any(record.outcome in ("failed", "timeout") for record in records) else 0

    def _measure(self, on_progress: Callable[[int, int], None]) -> "Iterator[Record]":
        (function,) = (
            subject.records for subject in SUBJECTS.values() if subject.sweep is type(self.sweep)
        )
        made: Iterator[Record] = pkgutil.resolve_name(function)(self.sweep, on_progress)
        return made

    def predictions(self, records: "list[Record]") -> "Iterator[Record]":
        """Yields predictions for the measured cases, if the subject has a model of them."""
        yield from ()


def _num_cases(sweep: Any) -> int:
    if isinstance(sweep, LayoutSweep):
        return len(list(sweep.cases())) * len(sweep.layouts)
    if isinstance(sweep, DataParallelSweep):
        return sum(len(case.variants) for case in sweep.cases())
    return len(list(sweep.cases()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutCommand(SweepCommand[LayoutSweep]):
    """Measure every layout, next to the planner's prediction."""

    calibration: pathlib.Path | None = None
    """Records of paceline calibrate on as many ranks; adds the planner's predictions."""

    def predictions(self, records: "list[Record]") -> "Iterator[Record]":
        """Yields the planner's predictions if a calibration is given."""
        if self.calibration is not None:
            from paceline.benchmarks.layouts import layout_predictions
            from paceline.records import RecordStore

            yield from layout_predictions(records, RecordStore(self.calibration).read())


class Subject(NamedTuple):
    """A part of training that can be measured."""

    sweep: type[Any]
    """Its options; their docstring is the help text."""
    records: str
    """Function of a sweep and a progress callback. A name, because its module loads torch."""
    command: Any = None
    """A command with options or output of its own."""


SUBJECTS = {
    "step": Subject(StepSweep, "paceline.benchmarks.step:step_records"),
    "attention": Subject(AttentionSweep, "paceline.benchmarks.attention:attention_records"),
    "comm": Subject(CollectiveSweep, "paceline.benchmarks.collectives:collective_records"),
    "ddp": Subject(DataParallelSweep, "paceline.benchmarks.strategies:data_parallel_records"),
    "layout": Subject(LayoutSweep, "paceline.benchmarks.layouts:layout_records", LayoutCommand),
    "memory": Subject(OptimizerSweep, "paceline.benchmarks.optimizer_memory:optimizer_records"),
    "kernels": Subject(KernelSweep, "paceline.benchmarks.kernels:kernel_records"),
}
"""Every subject of ``paceline bench``: a new benchmark is one entry here."""


def _command(sweep: type) -> type:
    """Returns the command of a sweep: a class, because tyro needs typeguard to check an alias."""
    command = types.new_class(f"{sweep.__name__}Command", (SweepCommand[sweep],))  # type: ignore[valid-type]
    return dataclasses.dataclass(frozen=True, kw_only=True)(command)


COMMANDS = {
    name: (subject.command or _command(subject.sweep), subject.sweep.__doc__)
    for name, subject in SUBJECTS.items()
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateCommand:
    """Measure this machine for a minute, so that training steps can be predicted."""

    sweep: Flat[CalibrationSweep]
    store: AppendedStore = DEFAULT_STORE
    output: Flat[OutputOptions]

    def run(self) -> int:
        """Measures, appends to the store, and prints."""
        from paceline.benchmarks.calibration import calibration_records

        with case_progress(1) as progress:
            made = calibration_records(self.sweep, progress.step)
            records = list(self.output.keep(made, self.store))
        self.output.tables(records)
        return 0
