"""Plots of the memory of a training step: over time, at three instants, and by strategy."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from paceline.accounting.memory.step import MemoryParts
from paceline.core.hardware import Device
from paceline.core.units import (
    format_binary_bytes,
    format_gibibytes,
    format_gigabytes,
    to_gibibytes,
    to_gigabytes,
)
from paceline.records import Record, join_key
from paceline.records.kinds import PREDICTION
from paceline.reports.fields import describe_case, split_fields, strategy_case
from paceline.reports.plots.style import (
    GRAY,
    MEMORY_STYLES,
    add_grid,
    add_label,
    blank_figure,
    memory_unit,
    stack_bars,
    subtitle,
)

_TIMELINE_PARTS = (
    "parameters",
    "optimizer_state",
    "other",
    "gradients",
    "activations",
    "temporary",
)
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
        axes.set(ylabel=f"memory ({name})", ylim=(0, 1.12 * peak / unit))
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
        [[value / unit for value in metrics[f"{part}_bytes"].samples] for part in _TIMELINE_PARTS],
        labels=[part.replace("_", " ") for part in _TIMELINE_PARTS],
        colors=[MEMORY_STYLES[part][0] for part in _TIMELINE_PARTS],
        hatch=[MEMORY_STYLES[part][1] for part in _TIMELINE_PARTS],
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


_PLANNED_PARTS = ("parameters", "optimizer_state", "buffers", "gradients", "activations")
_HEADROOM = 1.12


def plot_memory_plan(
    instants: Mapping[str, MemoryParts], *, title: str, device: Device | None = None
) -> Figure:
    """Draws the memory of a rank as a bar per instant, with a line at the device's capacity."""
    figure = blank_figure("Predicted memory of a training step", (7.5, 4.8))
    axes = figure.subplots()
    axes.set_title(title, fontsize="small", color=GRAY)
    highest = max(to_gibibytes(parts.total) for parts in instants.values())
    ends = stack_bars(
        axes,
        [name.replace("_", " ") for name in instants],
        {
            part.replace("_", " "): [
                to_gibibytes(getattr(parts, part)) for parts in instants.values()
            ]
            for part in _PLANNED_PARTS
        },
        {part.replace("_", " "): MEMORY_STYLES[part] for part in _PLANNED_PARTS},
        0.55,
        is_vertical=True,
        edgecolor="white",
        linewidth=0.5,
    )
    for position, (end, parts) in enumerate(zip(ends, instants.values(), strict=True)):
        total = format_gibibytes(to_gibibytes(parts.total), 2)
        add_label(axes, total, (position, end), (0, 3), ha="center", fontsize="small")
    if device is not None:
        capacity = to_gibibytes(device.memory_bytes.value)
        highest = max(highest, capacity)
        sold_as = format_gigabytes(to_gigabytes(device.memory_bytes.value))
        label = f"{device.description}: {format_gibibytes(capacity, 1)} ({sold_as})"
        axes.axhline(capacity, color="black", linestyle="--", linewidth=1.2, label=label)
    axes.set(
        ylim=(0, _HEADROOM * highest),
        ylabel="memory of one rank (GiB)",
        xlabel="instant of the step",
    )
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles[::-1], labels[::-1], loc="outside lower center", ncols=3, fontsize="small"
    )
    return figure


_MEASURED_PARTS = ("parameters", "optimizer_state", "gradients", "buffers", "activations")
_INSTANTS = {
    "before_step": "before the optimizer step: peak of forward and backward",
    "after_step": "after the optimizer step: peak during it",
}
_HEIGHT = 0.38
_SMALL = {"fontsize": "x-small", "color": GRAY}


def plot_optimizer_memory(records: Sequence[Record]) -> Figure:
    """Draws a panel per instant, with a measured and a hatched predicted bar per strategy."""
    measured = [record for record in records if record.kind != PREDICTION and record.metrics]
    predicted = {join_key(record): record for record in records if record.kind == PREDICTION}
    _shared, varying = split_fields(measured)
    most = max(
        record.metrics[f"peak_{instant}_bytes"].value
        for record in records
        for instant in _INSTANTS
        if record.metrics
    )
    unit, unit_name = memory_unit(most)
    labels = [strategy_case(record, varying) for record in measured]
    size = (8.0, 2.0 + 1.1 * len(measured))
    figure = blank_figure("Memory of one training step by strategy", size)
    panels = figure.subplots(len(_INSTANTS), sharex=True)
    for axes, (instant, title) in zip(panels, _INSTANTS.items(), strict=True):
        for position, record in enumerate(measured):
            _draw_bar(axes, record, instant, position - _HEIGHT / 2, unit, hatch=None)
            if (prediction := predicted.get(join_key(record))) is not None:
                _draw_bar(axes, prediction, instant, position + _HEIGHT / 2, unit, hatch="////")
        axes.set_yticks(range(len(measured)), labels)
        axes.invert_yaxis()
        axes.set_title(title, fontsize="small", loc="left")
        axes.set_xlim(0, 1.15 * most / unit)
        add_grid(axes, "x")
    panels[-1].set_xlabel(f"memory of the rank that holds most ({unit_name})")
    handles = [
        Patch(facecolor=MEMORY_STYLES[part][0], label=part.replace("_", " "))
        for part in _MEASURED_PARTS
    ]
    if predicted:
        handles.append(Patch(facecolor="white", edgecolor=GRAY, hatch="////", label="predicted"))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize="small")
    above = panels[0].transAxes
    panels[0].text(0.0, 1.14, subtitle(measured), _SMALL, transform=above)
    return figure


def _draw_bar(
    axes: Axes, record: Record, instant: str, position: float, unit: int, *, hatch: str | None
) -> None:
    left = 0.0
    for part in _MEASURED_PARTS:
        width = record.metrics[f"{instant}_{part}_bytes"].value / unit
        color = MEMORY_STYLES[part][0]
        axes.barh(position, width, _HEIGHT, left, color=color, hatch=hatch, edgecolor="w", lw=0)
        left += width
    total = format_binary_bytes(record.metrics[f"peak_{instant}_bytes"].value)
    axes.text(left, position, f" {total}", _SMALL, va="center")
