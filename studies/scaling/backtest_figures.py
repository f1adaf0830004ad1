"""Table and plot of extrapolated against observed losses, from the records of `porian.py`."""

import statistics
from collections.abc import Sequence

from matplotlib.figure import Figure

from paceline.records import Record
from paceline.reports.plots.style import COLORS, GRAY, add_grid, blank_figure
from paceline.reports.tables.table import Table

_STYLES = {
    "chosen": ("o", COLORS[2], "the method chosen by held-out budgets"),
    "lowest_run": ("s", COLORS[1], "lowest run"),
    "parametric near the best": ("v", COLORS[0], "surface, runs near the best"),
    "parametric": ("x", COLORS[3], "surface, all runs"),
}
_MIDDLE_WINDOW = 6
_APART = 1.05
"""Factor between the x positions of neighbouring markers at a budget."""


def backtest_summary(records: Sequence[Record]) -> Table:
    """Returns a table of each method's extrapolation errors, by sweep and number of budgets."""
    groups: dict[tuple[str, str], dict[int, list[Record]]] = {}
    for record in records:
        sweep, method = str(record.case["sweep"]), str(record.case["method"])
        windows = groups.setdefault((sweep, method), {})
        windows.setdefault(int(record.case["num_budgets"]), []).append(record)
    shown = sorted({number for windows in groups.values() for number in windows})
    most = {number: max(len(windows[number]) for windows in groups.values()) for number in shown}
    rows = []
    for (sweep, method), windows in groups.items():
        cells = [sweep, method]
        for number in shown:
            errors = [_backtest_error(record) for record in windows[number]]
            held = sum(_is_held(record) for record in windows[number])
            cells.append(
                f"{statistics.mean(errors):.2%}, at most {max(errors):.2%}; held "
                f"{held} of {most[number]}"
                + (f", none in {most[number] - len(errors)}" if len(errors) < most[number] else "")
            )
        rows.append(tuple(cells))
    return Table(
        headers=("sweep", "method", *(f"{number} budgets" for number in shown)),
        rows=tuple(rows),
        caption="error of the least loss at 8 times the largest budget fitted: mean, largest, and "
        "how often the 90% interval held it; chosen: by budgets held out inside each window",
    )


def _backtest_error(record: Record) -> float:
    return abs(record.metrics["loss"].value / record.metrics["observed_loss"].value - 1)


def _is_held(record: Record) -> bool:
    loss, observed = record.metrics["loss"], record.metrics["observed_loss"].value
    return loss.low is not None and loss.high is not None and loss.low <= observed <= loss.high


def plot_scaling_backtest(records: Sequence[Record]) -> Figure:
    """Draws the error of the loss predicted at 8 times the largest fitted budget, by sweep."""
    figure = blank_figure("Loss at 8 times the largest budget fitted, against the loss reached")
    sweeps = list(dict.fromkeys(str(record.case["sweep"]) for record in records))
    panels = figure.subplots(1, len(sweeps), sharey=True, squeeze=False)[0]
    for axes, sweep in zip(panels, sweeps, strict=True):
        axes.set_xscale("log")
        for number, (method, (marker, color, label)) in enumerate(_STYLES.items()):
            chosen = [
                record
                for record in records
                if record.case["sweep"] == sweep and record.case["method"] == method
            ]
            # Windows of several lengths predict the same budget, so their markers are spread out.
            places = [_place(record, number) for record in chosen]
            errors, below, above = [], [], []
            for record in chosen:
                loss, observed = record.metrics["loss"], record.metrics["observed_loss"].value
                errors.append(100 * (loss.value / observed - 1))
                below.append(100 * (loss.value - (loss.low or loss.value)) / observed)
                above.append(100 * ((loss.high or loss.value) - loss.value) / observed)
            axes.errorbar(
                *(places, errors, [below, above]),
                fmt=marker,
                color=color,
                ms=4.5,
                lw=0.9,
                label=label,
            )
        axes.axhline(0, color=GRAY, lw=0.8)
        add_grid(axes, "both")
        axes.set_xlabel("budget that was predicted (FLOPs)")
        axes.set_title(f"{sweep} learning rate", fontsize="medium")
        axes.set_ylim(-13, 18)
    panels[0].set_ylabel("error of the predicted loss (%), 90% interval")
    panels[0].legend(fontsize="small", frameon=False, loc="upper left")
    return figure


def _place(record: Record, number: int) -> float:
    """Returns the x position of a marker near its budget; `number` is the index of the method."""
    budget, shown = record.case["compute_budget"], record.case["num_budgets"]
    assert isinstance(budget, float)
    assert isinstance(shown, int)
    return float(budget * _APART ** (number + len(_STYLES) * (shown - _MIDDLE_WINDOW) / 2))
