"""Plots of plans: days against device-hours, and predicted against measured step times."""

import dataclasses
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

from paceline.planner.search.advice import FrontPoint
from paceline.predict.backtest import HeldOutPrediction
from paceline.records.schema import interval_ends
from paceline.reports.plots.style import COLORS, GRAY, add_grid, add_label, blank_figure
from paceline.reports.tables.predictions import summary_text

_DAY_S = 86_400.0
_HOUR_S = 3_600.0
_LABELS = {True: "on the front", False: "another is faster and cheaper"}
_COLORS = {True: COLORS[0], False: COLORS[1]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontMark:
    """A point of the plot: one number of devices."""

    devices: int
    layout: str
    device_hours: float
    days: float
    low: float
    """Days at the lower end of the step time's interval."""
    high: float
    on_front: bool


def front_marks(points: Sequence[FrontPoint], tokens: float) -> list[FrontMark]:
    """Returns the points to draw for a front from a search, for a run of `tokens` tokens."""
    marks = []
    for point in points:
        time = point.choice.step_time_s
        days = point.seconds_per_token * tokens / _DAY_S
        low, high = (days * end / time.value for end in interval_ends(time))
        marks.append(
            FrontMark(
                devices=point.devices,
                layout=point.choice.name,
                device_hours=point.device_seconds_per_token * tokens / _HOUR_S,
                days=days,
                low=low,
                high=high,
                on_front=point.on_front,
            )
        )
    return marks


def plot_front(marks: Sequence[FrontMark], subtitle: str) -> Figure:
    """Draws days against device-hours, with 90% intervals."""
    figure = blank_figure("Days against device-hours", (8.4, 4.8))
    axes = figure.subplots()
    axes.set_title(subtitle, fontsize="small", color=GRAY)
    front = sorted((mark.device_hours, mark.days) for mark in marks if mark.on_front)
    axes.plot(*zip(*front, strict=True), color=_COLORS[True], linewidth=1, zorder=1)
    for is_on_front, label in _LABELS.items():
        chosen = [mark for mark in marks if mark.on_front == is_on_front]
        if chosen:
            axes.errorbar(
                [mark.device_hours for mark in chosen],
                [mark.days for mark in chosen],
                [
                    [mark.days - mark.low for mark in chosen],
                    [mark.high - mark.days for mark in chosen],
                ],
                fmt="o",
                color=_COLORS[is_on_front],
                capsize=3,
                label=label,
            )
    for mark in marks:
        text = f"{mark.devices:,}: {mark.layout}"
        point = (mark.device_hours, mark.days)
        add_label(axes, text, point, (8, 2), fontsize="x-small", color=GRAY)
    hours = [mark.device_hours for mark in marks]
    spread = max(max(hours) - min(hours), 0.02 * max(hours))
    axes.set_xlim(left=min(hours) - 0.1 * spread, right=min(hours) + 1.7 * spread)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,.3g}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="device-hours", ylabel="days without failures, 90% interval")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    add_grid(axes, "both")
    return figure


_BAND = 0.2
_TICKS = [digit * 10.0**power for power in range(-4, 4) for digit in (1, 2, 5)]
_MARKERS = ("o", "s", "^", "D", "v", "P")


def plot_backtest(held_out: Sequence[HeldOutPrediction], *, counted: int) -> Figure:
    """Draws every case with its interval; only the first `counted` enter the summary."""
    figure = blank_figure("Step time: predicted against measured", (7.2, 6.4))
    axes = figure.subplots()
    axes.set_title(summary_text(held_out[:counted]), fontsize="x-small", color=GRAY, wrap=True)
    groups: dict[str, list[HeldOutPrediction]] = {}
    for each in held_out:
        labels = each.case.labels
        ranks = f"{labels['ranks']} rank{'' if labels['ranks'] == '1' else 's'}"
        groups.setdefault(f"{ranks}, {labels['link']}", []).append(each)
    for index, (name, group) in enumerate(groups.items()):
        predicted = [each.predicted for each in group]
        axes.errorbar(
            [each.case.measured_s for each in group],
            [each.value for each in predicted],
            yerr=[
                [each.value - interval_ends(each)[0] for each in predicted],
                [interval_ends(each)[1] - each.value for each in predicted],
            ],
            fmt=_MARKERS[index % len(_MARKERS)],
            color=COLORS[index % len(COLORS)],
            ecolor="#cccccc",
            markersize=4,
            linewidth=0,
            elinewidth=0.7,
            label=f"{name} ({len(group)})",
        )
    everything = [each.case.measured_s for each in held_out]
    ends = [0.8 * min(everything), 1.25 * max(everything)]
    axes.plot(ends, ends, color=GRAY, linewidth=1, label="predicted = measured")
    low, high = ([factor * end for end in ends] for factor in (1 - _BAND, 1 + _BAND))
    axes.fill_between(ends, low, high, color=GRAY, alpha=0.1, label=f"within {_BAND:.0%}")
    axes.set(xscale="log", yscale="log")
    ticks = [tick for tick in _TICKS if ends[0] <= tick <= ends[1]]
    for axis, set_limits in ((axes.xaxis, axes.set_xlim), (axes.yaxis, axes.set_ylim)):
        set_limits(*ends)
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="measured step time (s)", ylabel="predicted step time (s), with its interval")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small", loc="upper left")
    return figure
