"""Plot of days against device-hours: the best layout per number of devices, and the front."""

import dataclasses
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from paceline.planner.search.advice import FrontPoint
from paceline.reports.plots.style import COLORS, GRAY, add_grid, add_label, blank_figure

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
        marks.append(
            FrontMark(
                devices=point.devices,
                layout=point.choice.name,
                device_hours=point.device_seconds_per_token * tokens / _HOUR_S,
                days=days,
                low=days * (time.value if time.low is None else time.low) / time.value,
                high=days * (time.value if time.high is None else time.high) / time.value,
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
    axes.set_xlabel("device-hours")
    axes.set_ylabel("days without failures, 90% interval")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    add_grid(axes, "both")
    return figure
