"""History of predictions and measurements, used to correct later predictions.

Each user has one store. `paceline loop` appends each run's predictions and measurements to it.
Later predictions of the same quantity on the same hardware are corrected by earlier entries: times
by the ratio of measured to predicted, memory by the difference. Runs with a similar prediction have
the most weight. Single-rank runs have little weight for multi-rank runs, and vice versa. The
interval covers nine in ten of the earlier errors.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, get_args

import numpy as np

from paceline.accounting.intervals import COVERAGE, weighted_quantile
from paceline.core.errors import RecordError
from paceline.core.plan import Estimate
from paceline.predict.backtest import Accuracy, PredictionOutcome, accuracy
from paceline.records import Environment, Metric, Record, RecordStore, capture_environment

Quantity = Literal["step_time_s", "memory_bytes", "duration_s", "heldout_loss"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)

_KIND = "forecast"
_VARIABLE = "PACELINE_HISTORY"
_FEWEST = 5
"""Minimum number of earlier runs for a correction."""
_FIRST_STEPS = (0.9, 2.2)
"""Measured over predicted step time, 5% and 95% quantile, of the runs in `results/loop`.

The interval of the first predictions on a machine. These runs have steps of 6 to 60 ms on two cores
of a virtual machine; longer steps are usually predicted better.
"""
_OTHER_KIND = 0.1
"""Weight between single-rank and multi-rank runs: single-rank runs have no collectives."""
_LEAST_SPREAD = 0.03
"""Minimum half-width of an interval: the run-to-run spread of one model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HistoryEntry(PredictionOutcome):
    """One predicted and measured quantity of one run."""

    quantity: Quantity
    run: str
    """Name of the run."""
    parameters: int
    world_size: int
    threads: int
    """Threads of each rank."""
    hardware: str
    formula: float | None
    """Uncorrected prediction of the formulas; None if there is no formula, as for a loss."""


def history_path() -> pathlib.Path:
    """Returns the path of the user's store: PACELINE_HISTORY, or in the user's data directory."""
    if _VARIABLE in os.environ:
        return pathlib.Path(os.environ[_VARIABLE])
    if data := os.environ.get("XDG_DATA_HOME"):
        return pathlib.Path(data) / "paceline" / "history.jsonl"
    try:
        home = pathlib.Path.home()
    except RuntimeError as error:  # No HOME and no entry of the user, as in some containers.
        raise RecordError(
            f"this user has no home directory; set {_VARIABLE} to the file of the history"
        ) from error
    return home / ".local" / "share" / "paceline" / "history.jsonl"


def read_history(path: pathlib.Path) -> list[HistoryEntry]:
    """Returns all entries of a store, or an empty list if it does not exist."""
    return list(_entries(RecordStore(path).read())) if path.exists() else []


def append_history(path: pathlib.Path, entries: Iterable[HistoryEntry]) -> None:
    """Appends entries to a store, except those that it already contains."""
    environment = capture_environment()

    def missing(stored: Iterable[Record]) -> Iterator[Record]:
        known = set(_entries(stored))
        return (_record(each, environment) for each in entries if each not in known)

    RecordStore(path).append_missing(missing)


def _record(entry: HistoryEntry, environment: Environment) -> Record:
    metrics = {"measured": Metric(value=entry.measured)}
    if entry.formula is not None:
        metrics["formula"] = Metric(value=entry.formula)
    if entry.predicted is not None:
        metrics["predicted"] = Metric.from_estimate(entry.predicted)
    case = {
        field: getattr(entry, field)
        for field in ("quantity", "run", "parameters", "world_size", "threads", "hardware")
    }
    return Record(kind=_KIND, case=case, environment=environment, metrics=metrics, outcome="ok")


def corrected(
    quantity: Quantity,
    formula: float,
    hardware: str,
    world_size: int,
    history: Sequence[HistoryEntry],
) -> Estimate:
    """Returns a formula's prediction, corrected by earlier runs.

    With too few earlier runs, the prediction is uncorrected: a step time has an interval from runs
    on another machine, other quantities have none.
    """
    known = [
        (each.formula, each.measured, (each.world_size > 1) == (world_size > 1))
        for each in history
        if each.quantity == quantity and each.hardware == hardware and each.formula is not None
    ]
    if len(known) < _FEWEST:
        if quantity != "step_time_s":
            return Estimate(value=formula)
        low, high = (factor * formula for factor in _FIRST_STEPS)
        return Estimate(value=formula, low=low, high=high)
    formulas, measured, is_same_kind = np.array(known, dtype=np.float64).T
    # Overhead outside matmuls dominates the error of short steps, but not of long ones.
    weights = 1 / (1 + np.log2(formulas / formula) ** 2)
    weights *= np.where(is_same_kind, 1.0, _OTHER_KIND)
    if quantity == "memory_bytes":
        # A process's memory beyond its tensors does not grow with the tensors.
        beside = weighted_quantile(measured - formulas, weights, 0.5)
        value = max(formula + beside, 0.0)
        spread = weighted_quantile(np.abs(measured - formulas - beside), weights, COVERAGE)
        spread = max(spread, _LEAST_SPREAD * value)
        return Estimate(value=value, low=max(value - spread, 0.0), high=value + spread)
    logarithms = np.log(measured / formulas)
    factor = weighted_quantile(logarithms, weights, 0.5)
    spread = max(weighted_quantile(np.abs(logarithms - factor), weights, COVERAGE), _LEAST_SPREAD)
    value = formula * math.exp(factor)
    return Estimate(value=value, low=value * math.exp(-spread), high=value * math.exp(spread))


def accuracy_by_quantity(history: Sequence[HistoryEntry]) -> dict[Quantity, Accuracy]:
    """Returns the errors and the coverage of every quantity that was predicted."""
    predicted = {
        quantity: [each for each in history if each.quantity == quantity and each.predicted]
        for quantity in QUANTITIES
    }
    return {quantity: accuracy(entries) for quantity, entries in predicted.items() if entries}


def _entries(records: Iterable[Record]) -> Iterator[HistoryEntry]:
    for record in records:
        if record.kind != _KIND:
            continue
        metrics = record.metrics
        predicted, formula = metrics.get("predicted"), metrics.get("formula")
        yield HistoryEntry(
            **record.case,  # type: ignore[arg-type]
            formula=None if formula is None else formula.value,
            predicted=None
            if predicted is None
            else Estimate(value=predicted.value, low=predicted.low, high=predicted.high),
            measured=metrics["measured"].value,
        )
