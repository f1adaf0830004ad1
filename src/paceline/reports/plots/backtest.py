"""Plot of predicted against measured step times."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter

from paceline.predict.backtest import HeldOutPrediction
from paceline.reports.plots.style import COLORS, GRAY, blank_figure
from paceline.reports.tables.planning.backtest import summary_text

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
                [each.value - (each.low or each.value) for each in predicted],
                [(each.high or each.value) - each.value for each in predicted],
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
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [tick for tick in _TICKS if ends[0] <= tick <= ends[1]]
    for axis, set_limits in ((axes.xaxis, axes.set_xlim), (axes.yaxis, axes.set_ylim)):
        set_limits(*ends)
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("measured step time (s)")
    axes.set_ylabel("predicted step time (s), with its interval")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small", loc="upper left")
    return figure
