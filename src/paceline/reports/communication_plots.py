"""Throughput of collectives by message size, beside what the line could carry."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.core.units import GB
from paceline.records import Record
from paceline.records.links import line_bytes_per_s
from paceline.reports.figures import COLORS, GRAY, new_figure
from paceline.reports.selection import case_number, split_series

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_communication(records: Sequence[Record]) -> "Figure":
    """Draws algorithm bandwidth by size, a curve per number of ranks, and the theoretical one."""
    from paceline.accounting.collectives import bus_factor

    figure, axes = new_figure("Throughput of collectives", records)
    axes.set_xscale("log")
    axes.set_yscale("log")
    has_line_rate = False
    for index, (name, chosen) in enumerate(split_series(records, "size_bytes").items()):
        color = COLORS[index % len(COLORS)]
        sizes = [case_number(record, "size_bytes") for record in chosen]
        bandwidths = [record.metrics["algorithm_bandwidth_bytes_per_s"] for record in chosen]
        axes.plot(
            sizes,
            [bandwidth.value / GB for bandwidth in bandwidths],
            "o-",
            color=color,
            label=name,
            ms=4,
        )
        case = chosen[0].case
        line = line_bytes_per_s(case)
        if line is not None:
            has_line_rate = True
            factor = bus_factor(case["operation"], case_number(chosen[0], "world_size"))  # type: ignore[arg-type]
            ceiling = line / float(factor) / GB
            axes.plot(
                [sizes[0], sizes[-1]], [ceiling] * 2, "--", color=color, label=f"{name}: line rate"
            )
    if not has_line_rate:
        axes.text(
            0.02,
            0.98,
            "loopback: no line rate, so no theoretical curve",
            transform=axes.transAxes,
            va="top",
            fontsize="small",
            color=GRAY,
        )
    axes.set_xlabel("message size (bytes)")
    axes.set_ylabel("algorithm bandwidth (GB/s)")
    # Below the picture: the curves lie anywhere in it.
    figure.legend(fontsize="small", loc="outside lower center", ncols=2)
    return figure
