"""Plot of goodput by number of devices and recovery policy."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from paceline.records import CaseValue, Record
from paceline.reports.evidence.fields import case_number
from paceline.reports.plots.style import COLORS, GRAY, add_grid, blank_figure

# (recovery, checkpoint, has spares): (label, colour, marker).
_LINES: dict[tuple[CaseValue, CaseValue, bool], tuple[str, str, str]] = {
    ("replicas", "disk", False): ("replicas, no spares", COLORS[2], "o"),
    ("restart", "disk", True): ("restart, hot spares", COLORS[0], "s"),
    ("restart", "s3", True): ("restart, hot spares, checkpoints to S3", COLORS[3], "v"),
    ("restart", "disk", False): ("restart, no spares", COLORS[1], "^"),
}
_TITLES = {
    "cluster": "as on clusters: restart 10 min, detection 2 min",
    "measured": "as measured here: restart 11 s, detection 5 s",
}


def plot_goodput(records: Sequence[Record]) -> Figure:
    """Draws a panel per set of constants, with simulated goodput as dots and formulas as lines."""
    names = list(dict.fromkeys(str(record.case["constants"]) for record in records))
    figure = blank_figure("Goodput against devices", (9.6, 4.8))
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        chosen = [record for record in records if record.case["constants"] == name]
        for choice, (label, color, marker) in _LINES.items():
            line = sorted(
                (record for record in chosen if _choice(record) == choice),
                key=lambda record: case_number(record, "devices"),
            )
            devices = [case_number(record, "devices") for record in line]
            formula = [record.metrics["formula_goodput"].value for record in line]
            simulated = [record.metrics["goodput"].value for record in line]
            axes.plot(devices, formula, color=color)
            axes.plot(devices, simulated, marker, color=color, label=label)
        axes.set_xscale("log")
        ticks = sorted({case_number(record, "devices") for record in chosen})
        # Label every second tick, because neighbouring labels would touch.
        axes.xaxis.set_major_locator(FixedLocator(ticks[::2] if len(ticks) > 5 else ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("devices")
        axes.set_title(_TITLES.get(name, name), fontsize="small", color=GRAY)
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter("{x:.0%}")
        add_grid(axes, "both")
    panels[0].set_ylabel("share of devices' time that trains the model")
    panels[0].legend(loc="lower left", fontsize="small")
    return figure


def _choice(record: Record) -> tuple[CaseValue, CaseValue, bool]:
    case = record.case
    return case["recovery"], case["checkpoint"], bool(case["spare_hosts"])
