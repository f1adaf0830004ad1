"""Plot of memory over one training step, stacked by category."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paceline.core.units import format_binary_bytes
from paceline.records import Record
from paceline.records.kinds import PREDICTION
from paceline.reports.evidence.fields import describe_case, split_fields
from paceline.reports.plots.style import GRAY, MEMORY_STYLES, blank_figure, memory_unit, subtitle

_PARTS = ("parameters", "optimizer_state", "other", "gradients", "activations", "temporary")
_PHASES = ("forward", "backward", "optimizer")
_NARROW = 0.1
"""Phases below this share of the step have vertical labels."""


def plot_memory_timeline(records: Sequence[Record]) -> Figure:
    """Draws a panel per step, all with the same memory axis."""
    chosen = [record for record in records if record.kind != PREDICTION and record.metrics]
    _shared, varying = split_fields(chosen)
    figure = blank_figure("Memory over one training step", (8.0, 1.6 + 3.0 * len(chosen)))
    peak = max(record.metrics["peak_bytes"].value for record in chosen)
    unit, name = memory_unit(peak)
    panels = figure.subplots(len(chosen), sharey=True, squeeze=False)[:, 0]
    for axes, record in zip(panels, chosen, strict=True):
        _draw(axes, record, unit)
        peak_text = format_binary_bytes(record.metrics["peak_bytes"].value)
        title = f"{describe_case(record, varying)}: peak {peak_text}"
        axes.set_title(title, fontsize="small", loc="left")
        axes.set_ylabel(f"memory ({name})")
        axes.set_ylim(0, 1.12 * peak / unit)
    panels[-1].set_xlabel("time (ms), slowed by following every allocation")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize="small")
    figure.supxlabel(subtitle(chosen), fontsize="x-small", color=GRAY)
    return figure


def _draw(axes: Axes, record: Record, unit: int) -> None:
    metrics = record.metrics
    times = [1e3 * time for time in metrics["time_s"].samples]
    axes.stackplot(
        times,
        [[value / unit for value in metrics[f"{part}_bytes"].samples] for part in _PARTS],
        labels=[part.replace("_", " ") for part in _PARTS],
        colors=[MEMORY_STYLES[part][0] for part in _PARTS],
        hatch=[MEMORY_STYLES[part][1] for part in _PARTS],
        edgecolor="white",
        linewidth=0.0,
        step="post",
    )
    begin = 0.0
    for phase in _PHASES:
        if f"{phase}_end_s" in metrics:
            end = 1e3 * metrics[f"{phase}_end_s"].value
            axes.axvline(end, color=GRAY, linestyle=":", linewidth=1)
            rotation = 90 if end - begin < _NARROW * times[-1] else 0
            style = {"fontsize": "x-small", "rotation": rotation}
            middle, across = (begin + end) / 2, axes.get_xaxis_transform()
            axes.text(middle, 0.97, phase, style, transform=across, ha="center", va="top")
            begin = end
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0)
