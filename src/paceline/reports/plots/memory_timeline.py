"""Memory over one training step, stacked by what it is for."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.core.units import GIB, MIB, format_binary_bytes
from paceline.records import Record
from paceline.records.kinds import PREDICTION
from paceline.reports.evidence.fields import describe_case, split_fields
from paceline.reports.plots.style import GRAY, subtitle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From what is always there to what comes and goes; hatches tell them apart in grey.
_CATEGORIES = {
    "parameters": ("#30435c", ""),
    "optimizer_state": ("#5b7ba3", "///"),
    "other": ("#cfd6df", ""),
    "gradients": ("#d97b29", "\\\\\\"),
    "activations": ("#8fbf9a", ""),
    "temporary": ("#f0d26b", "..."),
}
_PHASES = ("forward", "backward", "optimizer")
_NARROW = 0.1
"""A phase that is a smaller part of the step has its name written upwards."""


def plot_memory_timeline(records: Sequence[Record]) -> "Figure":
    """Draws a panel per step, all on one scale of memory."""
    from matplotlib.figure import Figure

    chosen = [record for record in records if record.kind != PREDICTION and record.metrics]
    _shared, varying = split_fields(chosen)
    figure = Figure(figsize=(8.0, 1.6 + 3.0 * len(chosen)), layout="constrained")
    figure.suptitle("Memory over one training step", fontweight="bold")
    peak = max(record.metrics["peak_bytes"].value for record in chosen)
    unit, name = (GIB, "GiB") if peak >= GIB else (MIB, "MiB")
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


def _draw(axes: "Axes", record: Record, unit: int) -> None:
    metrics = record.metrics
    times = [1e3 * time for time in metrics["time_s"].samples]
    axes.stackplot(
        times,
        [[value / unit for value in metrics[f"{name}_bytes"].samples] for name in _CATEGORIES],
        labels=[name.replace("_", " ") for name in _CATEGORIES],
        colors=[color for color, _ in _CATEGORIES.values()],
        hatch=[hatch for _, hatch in _CATEGORIES.values()],
        edgecolor="white",
        linewidth=0.0,
        step="post",
    )
    begin = 0.0
    for phase in _PHASES:
        if f"{phase}_end_s" in metrics:
            end = 1e3 * metrics[f"{phase}_end_s"].value
            axes.axvline(end, color=GRAY, linestyle=":", linewidth=1)
            axes.text(
                (begin + end) / 2,
                0.97,
                phase,
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="top",
                fontsize="x-small",
                rotation=90 if end - begin < _NARROW * times[-1] else 0,
            )
            begin = end
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0)
