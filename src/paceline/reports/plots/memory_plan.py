"""Plot of the predicted memory of a training step at three instants, by category."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paceline.accounting.memory.step import MemoryParts
from paceline.core.hardware import Device
from paceline.core.units import format_gibibytes, format_gigabytes, to_gibibytes, to_gigabytes
from paceline.reports.plots.style import GRAY, MEMORY_STYLES, add_label, blank_figure

_PARTS = ("parameters", "optimizer_state", "buffers", "gradients", "activations")
_HEADROOM = 1.12


def plot_memory_plan(
    instants: Mapping[str, MemoryParts], *, title: str, device: Device | None = None
) -> Figure:
    """Draws the memory of a rank as a bar per instant, with a line at the device's capacity."""
    figure = blank_figure("Predicted memory of a training step", (7.5, 4.8))
    axes = figure.subplots()
    axes.set_title(title, fontsize="small", color=GRAY)
    highest = max(to_gibibytes(parts.total) for parts in instants.values())
    _stack(axes, instants)
    if device is not None:
        capacity = to_gibibytes(device.memory_bytes.value)
        highest = max(highest, capacity)
        sold_as = format_gigabytes(to_gigabytes(device.memory_bytes.value))
        label = f"{device.description}: {format_gibibytes(capacity, 1)} ({sold_as})"
        axes.axhline(capacity, color="black", linestyle="--", linewidth=1.2, label=label)
    axes.set_ylim(0, _HEADROOM * highest)
    axes.set_ylabel("memory of one rank (GiB)")
    axes.set_xlabel("instant of the step")
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles[::-1], labels[::-1], loc="outside lower center", ncols=3, fontsize="small"
    )
    return figure


def _stack(axes: Axes, instants: Mapping[str, MemoryParts]) -> None:
    names = [name.replace("_", " ") for name in instants]
    floors = [0.0] * len(names)
    for part in _PARTS:
        color, hatch = MEMORY_STYLES[part]
        heights = [to_gibibytes(getattr(parts, part)) for parts in instants.values()]
        axes.bar(
            names,
            heights,
            bottom=floors,
            width=0.55,
            color=color,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.5,
            label=part.replace("_", " "),
        )
        floors = [floor + height for floor, height in zip(floors, heights, strict=True)]
    for position, parts in enumerate(instants.values()):
        total = format_gibibytes(to_gibibytes(parts.total), 2)
        top = (position, floors[position])
        add_label(axes, total, top, (0, 3), ha="center", fontsize="small")
