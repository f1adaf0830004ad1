"""Every prediction of a run beside what came of it, and what that teaches the next prediction.

One store for a machine: `paceline loop` adds what it predicted of each run and what was measured.
A later prediction of the same quantity on the same hardware is corrected by those before it: a
time by their ratio, memory by their difference. Runs with a like prediction count most, and runs on
one rank count little for those on several. The interval is as wide as nine in ten of those were
off.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from paceline.core.plan import Estimate
from paceline.records import Metric, Record, RecordStore, capture_environment

Quantity = Literal["step_time_s", "memory_bytes", "duration_s", "heldout_loss"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)

_KIND = "forecast"
_VARIABLE = "PACELINE_HISTORY"
_LEVEL = 0.9
_FEWEST = 5
"""Earlier runs without which a prediction is not corrected."""
_OTHER_KIND = 0.1
"""Weight of a run on one rank for one on several, whose collectives it has not seen."""
_LEAST_SPREAD = 0.03
"""No interval is narrower on either side: runs of one model differ by as much."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """One quantity of one run, predicted and measured."""

    quantity: Quantity
    run: str
    """Name of the run."""
    parameters: int
    world_size: int
    threads: int
    """Of each rank."""
    hardware: str
    formula: float | None
    """What the formulas alone predict; None where there are none, as of a loss."""
    predicted: Estimate | None
    """What was predicted in the end; None of a run that was too early for that."""
    measured: float

    @property
    def error(self) -> float | None:
        """Relative error of the prediction."""
        return None if self.predicted is None else self.predicted.value / self.measured - 1

    @property
    def is_inside(self) -> bool | None:
        """Whether the interval held what was measured; None without an interval."""
        if self.predicted is None or self.predicted.low is None or self.predicted.high is None:
            return None
        return self.predicted.low <= self.measured <= self.predicted.high


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coverage:
    """All predictions of one quantity in a few numbers."""

    quantity: Quantity
    num_predicted: int
    median_error: float
    """Of the absolute relative errors."""
    largest_error: float
    num_intervals: int
    num_inside: int


def history_path() -> pathlib.Path:
    """Returns where the store of this user is: PACELINE_HISTORY, or among the user's data."""
    if _VARIABLE in os.environ:
        return pathlib.Path(os.environ[_VARIABLE])
    data = os.environ.get("XDG_DATA_HOME", "")
    base = pathlib.Path(data) if data else pathlib.Path.home() / ".local" / "share"
    return base / "paceline" / "history.jsonl"


def read_history(path: pathlib.Path) -> list[HistoryEntry]:
    """Reads all entries of a store; one that does not exist has none."""
    return list(_entries(RecordStore(path).read())) if path.exists() else []


def append_history(path: pathlib.Path, entries: Iterable[HistoryEntry]) -> None:
    """Adds entries to a store, except those that it has already."""
    known = set(read_history(path))
    store, environment = RecordStore(path), capture_environment()
    for each in entries:
        if each in known:
            continue
        metrics = {"measured": Metric(value=each.measured)}
        if each.formula is not None:
            metrics["formula"] = Metric(value=each.formula)
        if each.predicted is not None:
            metrics["predicted"] = Metric.from_estimate(each.predicted)
        case = {
            field: getattr(each, field)
            for field in ("quantity", "run", "parameters", "world_size", "threads", "hardware")
        }
        store.append(
            Record(kind=_KIND, case=case, environment=environment, metrics=metrics, outcome="ok")
        )


def corrected(
    quantity: Quantity,
    formula: float,
    hardware: str,
    world_size: int,
    history: Sequence[HistoryEntry],
) -> Estimate:
    """Returns what a formula predicts, corrected by earlier runs, with an interval if they allow.

    Args:
        quantity: What is predicted.
        formula: What the formulas alone predict; runs with a like prediction count most.
        hardware: The machine, of which alone earlier runs count.
        world_size: Ranks of the run; what one rank alone did says little of several, and the other
            way round.
        history: Earlier runs.
    """
    known = [
        (each.formula, each.measured, (each.world_size > 1) == (world_size > 1))
        for each in history
        if each.quantity == quantity and each.hardware == hardware and each.formula is not None
    ]
    if len(known) < _FEWEST:
        return Estimate(value=formula)
    formulas, measured, is_same_kind = np.array(known, dtype=np.float64).T
    # Short steps are off by what a step costs beside its matmuls, long ones are not.
    weights = 1 / (1 + np.log2(formulas / formula) ** 2)
    weights *= np.where(is_same_kind, 1.0, _OTHER_KIND)
    if quantity == "memory_bytes":
        # What a process holds beside its tensors does not grow with them.
        beside = _quantile(measured - formulas, weights, 0.5)
        value = max(formula + beside, 0.0)
        spread = _quantile(np.abs(measured - formulas - beside), weights, _LEVEL)
        spread = max(spread, _LEAST_SPREAD * value)
        return Estimate(value=value, low=max(value - spread, 0.0), high=value + spread)
    logarithms = np.log(measured / formulas)
    factor = _quantile(logarithms, weights, 0.5)
    spread = max(_quantile(np.abs(logarithms - factor), weights, _LEVEL), _LEAST_SPREAD)
    value = formula * math.exp(factor)
    return Estimate(value=value, low=value * math.exp(-spread), high=value * math.exp(spread))


def coverage(history: Iterable[HistoryEntry]) -> list[Coverage]:
    """Returns error and coverage of every quantity that was predicted."""
    found = []
    for quantity in QUANTITIES:
        predicted = [
            each for each in history if each.quantity == quantity and each.predicted is not None
        ]
        if not predicted:
            continue
        errors = np.abs([each.error for each in predicted if each.error is not None])
        inside = [each.is_inside for each in predicted if each.is_inside is not None]
        found.append(
            Coverage(
                quantity=quantity,
                num_predicted=len(predicted),
                median_error=float(np.median(errors)),
                largest_error=float(errors.max()),
                num_intervals=len(inside),
                num_inside=sum(inside),
            )
        )
    return found


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


def _quantile(
    values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], share: float
) -> float:
    """Returns the value below which lies a share of the weights."""
    order = np.argsort(values)
    cumulated = np.cumsum(weights[order])
    place = int(np.searchsorted(cumulated, share * cumulated[-1]))
    return float(values[order][min(place, len(values) - 1)])
