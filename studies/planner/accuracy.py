"""Tables and plot of the planner's accuracy, from the records of `validation.py`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from paceline.records import Record
from paceline.reports.plots.style import COLORS, GRAY, add_grid, blank_figure
from paceline.reports.tables.table import Table

ALL = "all"


def accuracy_table(records: Sequence[Record]) -> Table:
    """Returns a row per source: errors and intervals with the model held out."""
    chosen = _studies(records, "accuracy", "")
    return Table(
        headers=(
            *("source", "rows", "models", "error, mean", "median", "largest"),
            *("inside the 90% interval", "its half-width, median"),
        ),
        rows=tuple(
            (
                str(record.case["source"]),
                f"{_value(record, 'rows'):,.0f}",
                f"{_value(record, 'models'):.0f}",
                *(
                    f"{_value(record, name):.1%}"
                    for name in ("mean_error", "median_error", "largest_error")
                ),
                f"{_value(record, 'coverage'):.0%}",
                f"±{_value(record, 'half_width'):.1%}",
            )
            for record in chosen
        ),
        caption=(
            "Step times predicted while their model was held out (one number of devices, where a "
            "source has one model)"
        ),
    )


def regret_table(records: Sequence[Record]) -> Table:
    """Returns the regret of each source that has sweeps of at least five layouts."""
    return Table(
        headers=(
            *("source", "sweeps", "layouts", "first choice, mean", "largest"),
            *("best of three", "rule of thumb", "random"),
        ),
        rows=tuple(
            (
                str(record.case["source"]),
                f"{_value(record, 'sweeps'):.0f}",
                f"{_value(record, 'layouts'):,.0f}",
                *(
                    f"{_value(record, name):.1%}"
                    for name in ("first", "largest_first", "best_of_three")
                ),
                *(f"{_value(record, name):.0%}" for name in ("rule_of_thumb", "random")),
            )
            for record in _studies(records, "regret", "")
        ),
        caption=(
            "Regret: measured time of the layout that is picked over that of the best one, less 1"
        ),
    )


def ablation_table(records: Sequence[Record]) -> Table:
    """Returns a row per term and source: error and regret with and without the term."""
    whole = {str(record.case["source"]): record for record in _studies(records, "accuracy", "")}
    picks = {
        (str(record.case["source"]), str(record.case["without"])): record
        for record in records
        if record.case["study"] == "regret"
    }
    rows = []
    for record in records:
        term, source = str(record.case["without"]), str(record.case["source"])
        if record.case["study"] != "accuracy" or not term:
            continue
        regrets = (picks.get((source, "")), picks.get((source, term)))
        rows.append(
            (
                term.replace("_", " "),
                source,
                f"{_value(record, 'mean_error'):.1%}",
                f"{_value(whole[source], 'mean_error'):.1%}",
                *(
                    "" if each is None else f"{_value(each, 'first'):.1%}"
                    for each in reversed(regrets)
                ),
            )
        )
    return Table(
        headers=("term", "source", "error without it", "with it", "regret without it", "with it "),
        rows=tuple(rows),
        caption="Mean held-out error, and mean regret of the first choice, without a term and with",
    )


def _studies(records: Sequence[Record], study: str, without: str) -> list[Record]:
    chosen = [
        record
        for record in records
        if (record.case["study"], record.case["without"]) == (study, without)
    ]
    # The summary of all sources comes last.
    return sorted(chosen, key=lambda record: (record.case["source"] == ALL, _key(record)))


def _key(record: Record) -> str:
    return str(record.case["source"]).lower()


def _value(record: Record, name: str) -> float:
    return record.metrics[name].value


_CHOICES = {
    "random": "drawn at random",
    "rule_of_thumb": "rule of thumb",
    "first": "first choice",
    "best_of_three": "best of three",
}


def plot_validation(records: Sequence[Record]) -> Figure:
    """Draws predicted over measured step time by source, and the regret of four ways to choose."""
    whole = [record for record in records if record.case["without"] == ""]
    title = "Published runs, each predicted while its model was held out"
    figure = blank_figure(title, (10.5, 5.2))
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_ratios(left, [each for each in whole if each.case["study"] == "accuracy"])
    _draw_regret(right, [each for each in whole if each.case["study"] == "regret"])
    return figure


def _draw_ratios(axes: Any, records: Sequence[Record]) -> None:
    ordered = sorted(records, key=lambda record: -record.metrics["mean_error"].value)
    for place, record in enumerate(ordered):
        p5, p25, p50, p75, p95 = (
            record.metrics[f"ratio_p{percent}"].value for percent in (5, 25, 50, 75, 95)
        )
        color = COLORS[1] if record.case["source"] == "all" else COLORS[0]
        axes.plot([p5, p95], [place, place], color=color, linewidth=1.2)
        axes.barh(place, p75 - p25, left=p25, height=0.55, color=color, alpha=0.6)
        axes.plot([p50], [place], "|", color="black", markersize=9)
    axes.axvline(1.0, color=GRAY, linewidth=0.8)
    axes.set_yticks(
        range(len(ordered)),
        [f"{each.case['source']} ({each.metrics['rows'].value:,.0f})" for each in ordered],
    )
    axes.set_xlabel("predicted / measured step time: 5-95%, 25-75%, median")
    add_grid(axes, "x")


def _draw_regret(axes: Any, records: Sequence[Record]) -> None:
    ordered = sorted(records, key=lambda record: record.case["source"] == "all")
    height = 0.8 / len(_CHOICES)
    for number, (name, label) in enumerate(_CHOICES.items()):
        values = [100 * record.metrics[name].value for record in ordered]
        places = np.arange(len(ordered)) + (number - 1.5) * height
        axes.barh(places, values, height=height, color=COLORS[number], label=label)
        for place, value in zip(places, values, strict=True):
            axes.text(value, place, f" {value:.1f}", va="center", fontsize=7)
    axes.set_yticks(
        range(len(ordered)),
        [f"{each.case['source']} ({each.metrics['sweeps'].value:.0f} sweeps)" for each in ordered],
    )
    axes.invert_yaxis()
    axes.set_xlabel("mean regret in %")
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.3, 1.0), ncols=2)
    add_grid(axes, "x")
