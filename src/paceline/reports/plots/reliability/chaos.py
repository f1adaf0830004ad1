"""Plot of a run with injected faults: steps over time."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from paceline.core.errors import UsageError
from paceline.records import Record
from paceline.reports.plots.style import COLORS, GRAY, add_grid, blank_figure

_FAULT_COLORS = {
    "kill": COLORS[1],
    "stop": COLORS[0],
    "corrupt": COLORS[3],
    "disk-full": COLORS[5],
    "link-down": COLORS[2],
    "link-slow": "#8fbf9a",
    "link-loss": COLORS[4],
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
            record.case[field] == run.case[field] for field in ("command", "seed", "num_hosts")
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
    axes.set_xlim(0, run.metrics["duration_s"].value)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds; a coloured span lasts from a fault to the next step")
    axes.set_ylabel("newest step")
    if named:
        axes.legend(loc="upper left", fontsize="small")
    return figure
