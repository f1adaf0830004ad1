"""A sweep: the final losses of many training runs, checked before anything is fitted.

Invariants of a `Sweep`: every number is finite and positive, all columns have one entry per run,
and its remarks list the problems with the rows that it was built from. An invalid number raises an
error that names the row and field. A failed run (no loss, diverged, duplicate row) is left out with
a remark, because a sweep of hundreds of runs always has a few.

`trim_far_runs` leaves out models much too large for their budget: in Porian et al. 2024 (arXiv
2406.19146) such runs end at up to twice the loss of their budget's best, on a curve that neither a
parabola in log N nor a sum of two powers describes. `draw_counts` makes bootstrap replicates: rows
of counts, not copies of the runs, so that every fit processes a thousand of them at once.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from paceline.core.errors import UsageError
from paceline.scaling.surface import Array, Numbers, compute_for, tokens_for

RemarkName = Literal["no_loss", "not_ok", "diverged", "duplicate", "repeat"]

# Budgets that differ by less are the same budget: runs stop at whole steps, not at exact FLOPs.
_SAME_BUDGET = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remark:
    """A note about one row."""

    name: RemarkName
    row: int
    """Number of the row in the file, from 1."""
    message: str
    is_left_out: bool = True
    """Whether the row is excluded from the sweep."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """The training curve of one run."""

    tokens: Array
    loss: Array


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sweep:
    """Runs as columns."""

    parameters: Array
    """N of every run."""
    tokens: Array
    """D of every run."""
    loss: Array
    """Final loss of every run."""
    compute: Array
    """The stated budget if given, else 6 N D."""
    curves: tuple[Curve | None, ...] = ()
    """Training curves, one per run, or empty if there are none."""
    remarks: tuple[Remark, ...] = ()
    """Problems with the rows that the sweep was built from."""

    def __post_init__(self) -> None:
        for field in ("parameters", "tokens", "loss", "compute"):
            column = getattr(self, field)
            if column.shape != self.loss.shape or not (np.isfinite(column) & (column > 0)).all():
                raise UsageError(
                    f"Sweep.{field}: one positive, finite number per run is needed; leave out "
                    "runs without a loss"
                )

    def __len__(self) -> int:
        return len(self.loss)

    @classmethod
    def from_arrays(cls, *, parameters: Numbers, compute: Numbers, loss: Numbers) -> "Sweep":
        """Builds a sweep from `parameters`, `compute` and `loss`; tokens are C / 6N."""
        sizes, budgets, losses = (
            np.asarray(column, dtype=np.float64) for column in (parameters, compute, loss)
        )
        tokens = tokens_for(budgets, sizes)
        return cls(parameters=sizes, tokens=tokens, compute=budgets, loss=losses)

    @property
    def budgets(self) -> Array:
        """The distinct budgets in ascending order, each the geometric mean of its runs."""
        index = self.budget_index
        totals = np.bincount(index, weights=np.log(self.compute))
        return np.asarray(np.exp(totals / np.bincount(index)))

    @property
    def budget_index(self) -> "np.ndarray[tuple[int], np.dtype[np.intp]]":
        """Index into `budgets` for every run."""
        order = np.argsort(self.compute, kind="stable")
        logs = np.log(self.compute[order])
        index = np.empty(len(self), dtype=np.intp)
        number, first = 0, logs[0]
        for position, log in zip(order, logs, strict=True):
            if log - first > _SAME_BUDGET:
                number, first = number + 1, log
            index[position] = number
        return index

    def of_runs(self, is_chosen: npt.NDArray[np.bool_]) -> "Sweep":
        """Returns the subset of runs selected by `is_chosen`, with the remarks of all rows."""
        columns = {
            field: getattr(self, field)[is_chosen]
            for field in ("parameters", "tokens", "loss", "compute")
        }
        curves = tuple(itertools.compress(self.curves, is_chosen))
        return dataclasses.replace(self, **columns, curves=curves)

    @property
    def has_curves(self) -> bool:
        """Whether any run has a training curve."""
        return any(curve is not None for curve in self.curves)


def sweep_from_rows(rows: Sequence[Mapping[str, object]], source: str) -> Sweep:
    """Builds a sweep from rows with `parameters`, `compute_budget` or `tokens`, `final_loss`."""
    remarks: list[Remark] = []
    kept: list[tuple[float, float, float, float, Curve | None]] = []
    seen: dict[tuple[float, float], list[tuple[int, float]]] = {}
    for number, row in enumerate(rows, start=1):
        where = f"{source}: row {number}"
        trouble = _failure(row)
        if trouble is None:
            parameters, tokens, compute = run_size(row, where)
            curve = _curve(row, where)
            trouble = _trouble(row, where, curve)
        if trouble is not None:
            remarks.append(Remark(name=trouble[0], row=number, message=trouble[1]))
            continue
        loss = _number(row, "final_loss", where)
        if loss <= 0:
            raise UsageError(f"{where}: final_loss is {loss:g}; it must be positive")
        earlier = seen.setdefault((parameters, tokens), [])
        again = next((first for first, its_loss in earlier if its_loss == loss), None)
        if again is not None:
            message = f"the same run as row {again}; counted once"
            remarks.append(Remark(name="duplicate", row=number, message=message))
            continue
        if earlier:
            message = f"repeats row {earlier[0][0]} with another loss; both are used, as two seeds"
            remarks.append(Remark(name="repeat", row=number, message=message, is_left_out=False))
        earlier.append((number, loss))
        kept.append((parameters, tokens, compute, loss, curve))
    if not kept:
        raise UsageError(f"{source}: no usable runs in {len(rows)} rows; see the rows' final_loss")
    columns = np.array([run[:4] for run in kept], dtype=np.float64)
    curves = tuple(run[4] for run in kept)
    return Sweep(
        parameters=columns[:, 0],
        tokens=columns[:, 1],
        compute=columns[:, 2],
        loss=columns[:, 3],
        curves=curves if any(curve is not None for curve in curves) else (),
        remarks=tuple(remarks),
    )


def run_size(row: Mapping[str, object], where: str) -> tuple[float, float, float]:
    """Returns a row's parameters, tokens and compute; C = 6ND fills in the missing one."""
    parameters = positive_number(row, "parameters", where)
    has_tokens, has_compute = (_is_given(row, field) for field in ("tokens", "compute_budget"))
    if not has_tokens and not has_compute:
        raise UsageError(
            f"{where}: neither compute_budget nor tokens is given; one of them is needed"
            f" (its fields: {', '.join(row) or 'none'})"
        )
    compute = positive_number(row, "compute_budget", where) if has_compute else math.nan
    tokens = positive_number(row, "tokens", where) if has_tokens else math.nan
    if not has_tokens:
        tokens = float(tokens_for(compute, parameters))
    if not has_compute:
        compute = float(compute_for(parameters, tokens))
    return parameters, tokens, compute


def _failure(row: Mapping[str, object]) -> tuple[RemarkName, str] | None:
    """Returns how a run failed if its row reports a failure; its numbers are then meaningless."""
    outcome = row.get("outcome")
    if outcome in (None, "", "ok"):
        return None
    return "diverged" if outcome == "diverged" else "not_ok", f"outcome {outcome!r}; left out"


def _trouble(
    row: Mapping[str, object], where: str, curve: Curve | None
) -> tuple[RemarkName, str] | None:
    """Returns the reason why a run's loss is unusable, or None."""
    if "final_loss" not in row:
        raise UsageError(f"{where}: final_loss is missing (its fields: {', '.join(row) or 'none'})")
    if not _is_given(row, "final_loss"):
        return "no_loss", "final_loss is empty; left out"
    loss = _number(row, "final_loss", where)
    if not math.isfinite(loss):
        return "no_loss", f"final_loss is {loss}; left out"
    if curve is not None and loss > curve.loss[0]:
        return "diverged", f"ended at {loss:.4g}, above its first {curve.loss[0]:.4g}; left out"
    return None


def _curve(row: Mapping[str, object], where: str) -> Curve | None:
    given = row.get("curve")
    if given in (None, "", []):
        return None
    try:
        points = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        points = np.empty(0)
    if points.ndim != 2 or points.shape[1] != 2:
        raise UsageError(f"{where}: curve must be a list of [tokens, loss] pairs")
    points = points[np.isfinite(points).all(axis=1)]
    if not len(points) or (points <= 0).any() or (np.diff(points[:, 0]) <= 0).any():
        raise UsageError(
            f"{where}: curve needs positive losses at tokens that grow from row to row"
        )
    return Curve(tokens=points[:, 0], loss=points[:, 1])


def _is_given(row: Mapping[str, object], field: str) -> bool:
    return row.get(field) not in (None, "")


def positive_number(row: Mapping[str, object], field: str, where: str) -> float:
    """Returns a required field as a positive, finite number."""
    if not _is_given(row, field):
        raise UsageError(f"{where}: {field} is missing (its fields: {', '.join(row) or 'none'})")
    value = _number(row, field, where)
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{where}: {field} is {value:g}; it must be positive and finite")
    return value


def _number(row: Mapping[str, object], field: str, where: str) -> float:
    value = row[field]
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        return float(value)
    except (ValueError, OverflowError):
        raise UsageError(f"{where}: {field} is {value!r}; it must be a number") from None


MOST_ABOVE_BEST = 0.05
FEWEST_KEPT = 4


def trim_far_runs(sweep: Sweep) -> Sweep:
    """Returns the runs near the best of their budget."""
    index = sweep.budget_index
    lowest = np.full(index.max() + 1, np.inf)
    np.minimum.at(lowest, index, sweep.loss)
    is_kept = sweep.loss <= (1 + MOST_ABOVE_BEST) * lowest[index]
    for budget in range(len(lowest)):
        members = np.flatnonzero(index == budget)
        is_kept[members[np.argsort(sweep.loss[members], kind="stable")[:FEWEST_KEPT]]] = True
    return sweep.of_runs(is_kept)


MethodName = Literal["lowest_run", "parabola", "envelope", "huber", "parametric"]

DEFAULT_DRAWS = 1000
_FEWEST_ANSWERS = 0.5


def draw_counts(sweep: Sweep, num_draws: int = DEFAULT_DRAWS, seed: int = 0) -> Array:
    """Returns one row per replicate: the number of times it drew each run."""
    size = len(sweep)
    generator = np.random.default_rng(seed)
    return generator.multinomial(size, np.full(size, 1 / size), size=num_draws).astype(np.float64)


def require_replicates(method: MethodName, fraction: float) -> None:
    """Raises an error if fewer than half of a method's replicates produce an answer."""
    if fraction < _FEWEST_ANSWERS:
        raise UsageError(
            f"{method}: only {fraction:.0%} of the bootstrap replicates give an answer, so it has "
            "no interval; add runs at other sizes and budgets"
        )


def widen(value: Array, draws: Array, num_runs: int, num_coefficients: int) -> Array:
    """Widens the draws of a positive number about its estimate, to correct for degrees of freedom.

    A replicate repeats some runs and its fit adapts to them. Its residuals, and therefore the
    spread of the draws, are too small by a factor that depends on coefficients per run.
    """
    factor = np.sqrt(num_runs / max(num_runs - num_coefficients, 1))
    return np.asarray(value * (draws / value) ** factor)
