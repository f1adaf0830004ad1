"""Plots of a run with injected faults, and of goodput by number of devices and recovery policy."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from paceline.core.errors import UsageError
from paceline.records import CaseValue, Record
from paceline.records.kinds import NUM_SITES
from paceline.reports.fields import case_number
from paceline.reports.plots.style import COLORS, GRAY, add_grid, blank_figure

_FAULT_COLORS = {
    "kill": COLORS[1],
    "stop": COLORS[0],
    "corrupt": COLORS[3],
    "disk-full": COLORS[5],
    "link-down": COLORS[2],
    "link-slow": "#8fbf9a",
    "link-loss": COLORS[4],
    "site-down": "#2e7d8c",
    "site-kill": "#a3392e",
}


def plot_chaos(records: Sequence[Record]) -> Figure:
    """Draws the newest run: steps over seconds, with each fault as a span until the next step."""
    runs = [record for record in records if record.kind == "chaos_run"]
    if not runs:
        raise UsageError("nothing to draw: the records have no run under chaos")
    run = runs[-1]
    figure = blank_figure("A run under chaos", (9.6, 4.4))
    axes = figure.subplots()
    counts = [round(run.metrics[name].value) for name in ("tried", "survived", "lost")]
    axes.set_title(
        f"{counts[0]} faults tried, {counts[1]} survived, {counts[2]} lost; "
        f"started {run.metrics['num_starts'].value:.0f} times; seed {run.case['seed']}",
        fontsize="small",
        color=GRAY,
    )
    named: set[str] = set()
    for record in records:
        if record.kind == "chaos_fault" and all(
            record.case.get(field) == run.case.get(field)
            for field in ("command", "seed", "num_hosts", NUM_SITES)
        ):
            kind = str(record.case["fault"])
            begin = record.metrics["at_s"].value
            end = begin + sum(
                record.metrics[name].value
                for name in ("lasts_s", "recovery_time_s")
                if name in record.metrics
            )
            color = _FAULT_COLORS.get(kind, GRAY)
            label = None if kind in named else kind
            named.add(kind)
            axes.axvspan(begin, end, color=color, alpha=0.25, linewidth=0)
            axes.axvline(begin, color=color, linewidth=1.2, label=label)
    axes.plot(
        run.metrics["progress_s"].samples,
        run.metrics["progress_step"].samples,
        color="black",
        linewidth=1.4,
    )
    add_grid(axes, "y")
    axes.set(
        xlim=(0, run.metrics["duration_s"].value),
        ylim=(0, None),
        xlabel="seconds; a coloured span lasts from a fault to the next step",
        ylabel="newest step",
    )
    if named:
        axes.legend(loc="upper left", fontsize="small")
    return figure


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
