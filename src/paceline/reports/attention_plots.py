"""Pictures of attention by sequence length, on log axes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.core.units import MIB
from paceline.records import Record
from paceline.reports.figures import COLORS, new_figure
from paceline.reports.selection import case_number, split_series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLES = ("o-", "s--")


def plot_attention_time(records: Sequence[Record]) -> "Figure":
    """Draws both passes by sequence length."""
    metrics = {"forward": "forward_time_s", "backward": "backward_time_s"}
    return _plot(
        "Attention that stores its scores: time", records, metrics, scale=1e3, unit="time (ms)"
    )


def plot_attention_memory(records: Sequence[Record]) -> "Figure":
    """Draws the memory kept for backward and the peak by sequence length."""
    metrics = {"saved for backward": "saved_for_backward_bytes", "peak": "peak_bytes"}
    return _plot(
        "Attention that stores its scores: memory",
        records,
        metrics,
        scale=1 / MIB,
        unit="memory (MiB)",
    )


def _plot(
    title: str, records: Sequence[Record], metrics: dict[str, str], *, scale: float, unit: str
) -> "Figure":
    figure, axes = new_figure(title, records)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for index, (name, chosen) in enumerate(split_series(records, "context").items()):
        for style, (label, metric) in zip(_STYLES, metrics.items(), strict=True):
            axes.plot(
                [case_number(record, "context") for record in chosen],
                [record.metrics[metric].value * scale for record in chosen],
                style,
                color=COLORS[index % len(COLORS)],
                label=f"{label}, {name}",
                ms=4,
            )
    lengths = sorted({case_number(record, "context") for record in records})
    axes.set_xticks(lengths, [f"{length:,.0f}" for length in lengths])
    axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
    axes.set_xlabel("sequence length (tokens)")
    axes.set_ylabel(unit)
    unmeasured = {
        case_number(record, "context"): record.outcome.replace("_", " ")
        for record in records
        if not record.metrics
    }
    for length, outcome in unmeasured.items():
        axes.axvline(length, color="#aa3333", alpha=0.4, linestyle=":")
        axes.text(
            length,
            0.02,
            f"{outcome} ",
            rotation=90,
            ha="right",
            va="bottom",
            color="#aa3333",
            fontsize="small",
            transform=axes.get_xaxis_transform(),
        )
    axes.legend(fontsize="x-small", ncols=2, loc="upper left")
    return figure
