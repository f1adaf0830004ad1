"""Predictions for a loop's runs, paired with measurements."""

import pathlib
from collections.abc import Iterator, Sequence

from paceline.core.errors import UsageError
from paceline.core.plan import Estimate
from paceline.predict.calibration import calibrations
from paceline.predict.history import HistoryEntry, Quantity, corrected
from paceline.records import Record, RecordStore
from paceline.records.environment import threads_per_rank
from paceline.training.config import RunConfig
from paceline.training.forecast import forecast
from paceline.workflows.loop.directory import ChosenLayout, ChosenModel
from paceline.workflows.sweep.cost import expected_time_s
from paceline.workflows.sweep.design import CHECKS, FIT, PlannedRun
from paceline.workflows.sweep.directory import RunRow, SweepDirectory
from paceline.workflows.sweep.run_config import run_config


def sweep_entries(
    sweep: SweepDirectory,
    calibration: pathlib.Path,
    ranks: int,
    history: Sequence[HistoryEntry],
    name: str,
) -> list[HistoryEntry]:
    """Returns entries for every run of a sweep, each predicted from the runs planned before it.

    Args:
        sweep: The sweep.
        calibration: Calibration records for the number of ranks that ran concurrently.
        ranks: Ranks per run.
        history: Entries from before the sweep.
        name: Name of the loop, to distinguish its runs from those of other loops.
    """
    known = calibrations(RecordStore(calibration).read())
    hardware = str(known[0].topology["hardware"])
    state, base = sweep.state(), sweep.base()
    at_once = state.at_once or 1
    rows = {row.name: row for row in sweep.rows(*CHECKS, FIT)}
    made: list[HistoryEntry] = []
    before: list[RunRow] = []
    for run in state.runs:
        row = rows.get(run.name)
        if row is None or row.outcome != "ok":
            continue
        config = run_config(base, run, sweep.run_directory(run))
        step_time_s, memory_bytes = _formulas(config, ranks, calibration, at_once)
        formulas: dict[Quantity, tuple[float | None, float | None]] = {
            "step_time_s": (step_time_s, row.step_time_s),
            "memory_bytes": (memory_bytes, row.memory_bytes),
        }
        earlier = [*history, *made]
        expected: dict[Quantity, tuple[float | None, Estimate | None, float | None]] = {
            quantity: (
                formula,
                None if formula is None else corrected(quantity, formula, hardware, ranks, earlier),
                measured,
            )
            for quantity, (formula, measured) in formulas.items()
        }
        time_s = expected_time_s(run, before)
        expected["duration_s"] = (
            None,
            None if time_s is None else Estimate(value=time_s),
            None if row.is_resumed else row.time_s,
        )
        expected["heldout_loss"] = None, run.expected_loss, row.final_loss
        made += _entries(
            expected, run, f"{name}/{run.name}", ranks, threads_per_rank(ranks * at_once), hardware
        )
        before.append(row)
    return made


def _formulas(
    config: RunConfig, ranks: int, calibration: pathlib.Path, at_once: int
) -> tuple[float | None, float]:
    """Returns the step time, if available, and the memory predicted by the formulas."""
    try:
        predicted = forecast(config, ranks, calibration, at_once=at_once)
    except UsageError:
        # A refined run may be too different from the models calibrated before the sweep.
        predicted = forecast(config, ranks)
    return predicted.step_time_s, float(predicted.memory_bytes or 0)


def run_entries(
    model: ChosenModel, layout: ChosenLayout, record: Record, time_s: float | None, name: str
) -> list[HistoryEntry]:
    """Returns entries for the final run: its predictions, paired with its record.

    Args:
        model: The model, with its predicted loss.
        layout: The layout, with its predicted times and memory.
        record: Record of the run.
        time_s: Duration of the run; None of a resumed run, whose attempts are not added up.
        name: Name of the loop.
    """
    measured = {metric: value.value for metric, value in record.metrics.items()}
    best = layout.chosen
    expected: dict[Quantity, tuple[float | None, Estimate | None, float | None]] = {
        "heldout_loss": (None, model.loss, measured.get("heldout_loss")),
        "step_time_s": (best.step_time_s, layout.step_time_s, measured.get("step_time_s")),
        "memory_bytes": (best.memory_bytes, layout.memory_bytes, measured.get("memory_bytes")),
        "duration_s": (None, layout.duration_s, time_s),
    }
    place = best.ranks, layout.threads, layout.hardware
    return list(_entries(expected, model.run, f"{name}/{model.run.name}", *place))


def _entries(
    expected: dict[Quantity, tuple[float | None, Estimate | None, float | None]],
    run: PlannedRun,
    name: str,
    ranks: int,
    threads: int,
    hardware: str,
) -> Iterator[HistoryEntry]:
    for quantity, (formula, predicted, measured) in expected.items():
        if measured is not None:
            yield HistoryEntry(
                quantity=quantity,
                run=name,
                parameters=run.parameters,
                world_size=ranks,
                threads=threads,
                hardware=hardware,
                formula=formula,
                predicted=predicted,
                measured=measured,
            )
