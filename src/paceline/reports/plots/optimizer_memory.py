"""Plot of the memory of a step by strategy and category, measured and predicted."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from paceline.core.units import format_binary_bytes
from paceline.records import Record, join_key
from paceline.records.kinds import PREDICTION
from paceline.reports.evidence.fields import split_fields, strategy_case
from paceline.reports.plots.style import (
    GRAY,
    MEMORY_STYLES,
    add_grid,
    blank_figure,
    memory_unit,
    subtitle,
)

_PARTS = ("parameters", "optimizer_state", "gradients", "buffers", "activations")
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
        for place, record in enumerate(measured):
            _draw_bar(axes, record, instant, place - _HEIGHT / 2, unit, hatch=None)
            if (prediction := predicted.get(join_key(record))) is not None:
                _draw_bar(axes, prediction, instant, place + _HEIGHT / 2, unit, hatch="////")
        axes.set_yticks(range(len(measured)), labels)
        axes.invert_yaxis()
        axes.set_title(title, fontsize="small", loc="left")
        axes.set_xlim(0, 1.15 * most / unit)
        add_grid(axes, "x")
    panels[-1].set_xlabel(f"memory of the rank that holds most ({unit_name})")
    handles = [
        Patch(facecolor=MEMORY_STYLES[part][0], label=part.replace("_", " ")) for part in _PARTS
    ]
    if predicted:
        handles.append(Patch(facecolor="white", edgecolor=GRAY, hatch="////", label="predicted"))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize="small")
    above = panels[0].transAxes
    panels[0].text(0.0, 1.14, subtitle(measured), _SMALL, transform=above)
    return figure


def _draw_bar(
    axes: Axes, record: Record, instant: str, place: float, unit: int, *, hatch: str | None
) -> None:
    left = 0.0
    for part in _PARTS:
        width = record.metrics[f"{instant}_{part}_bytes"].value / unit
        color = MEMORY_STYLES[part][0]
        axes.barh(place, width, _HEIGHT, left, color=color, hatch=hatch, edgecolor="w", lw=0)
        left += width
    total = format_binary_bytes(record.metrics[f"peak_{instant}_bytes"].value)
    axes.text(left, place, f" {total}", _SMALL, va="center")
