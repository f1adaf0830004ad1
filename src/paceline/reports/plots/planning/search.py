"""Time against device-hours: the best layout of every number of devices, and the front of them."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from paceline.planner.search.advice import FrontPoint
from paceline.reports.plots.style import COLORS, GRAY, add_grid, add_label, blank_figure

_DAY_S = 86_400.0
_HOUR_S = 3_600.0


def plot_front(points: Sequence[FrontPoint], tokens: float, subtitle: str) -> Figure:
    """Draws days against device-hours for so many tokens, with 90% intervals of the days."""
    figure = blank_figure("Days against device-hours", (8.4, 4.8))
    axes = figure.subplots()
    axes.set_title(subtitle, fontsize="small", color=GRAY)
    hours = [point.device_seconds_per_token * tokens / _HOUR_S for point in points]
    days = [point.seconds_per_token * tokens / _DAY_S for point in points]
    front = sorted(
        (hour, day) for point, hour, day in zip(points, hours, days, strict=True) if point.on_front
    )
    axes.plot(*zip(*front, strict=True), color=COLORS[0], linewidth=1, zorder=1)
    labelled: set[bool] = set()
    for point, hour, day in zip(points, hours, days, strict=True):
        time = point.choice.step_time_s
        low = day if time.low is None else day * time.low / time.value
        high = day if time.high is None else day * time.high / time.value
        color = COLORS[0] if point.on_front else COLORS[1]
        label = "on the front" if point.on_front else "another is faster and cheaper"
        axes.errorbar(
            [hour],
            [day],
            [[day - low], [high - day]],
            fmt="o",
            color=color,
            capsize=3,
            label=None if point.on_front in labelled else label,
        )
        labelled.add(point.on_front)
        add_label(
            axes,
            f"{point.devices:,}: {point.choice.name}",
            (hour, day),
            (8, 2),
            fontsize="x-small",
            color=GRAY,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,.3g}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlim(left=0.95 * min(hours), right=min(hours) + 1.75 * (max(hours) - min(hours)))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("device-hours")
    axes.set_ylabel("days without failures, 90% interval")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    add_grid(axes, "both")
    return figure
