"""Plot of collective throughput by message size, with the line rate."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from paceline.core.units import GB
from paceline.records import Record
from paceline.records.links import find_link, is_loopback
from paceline.reports.evidence.fields import case_number, split_series
from paceline.reports.plots.style import COLORS, GRAY, new_figure

_ROOM = 2.0
"""Factor by which the y axis is extended at both ends, so that small differences look small."""


def plot_communication(records: Sequence[Record]) -> Figure:
    """Draws algorithm bandwidth by message size, with the ceiling from the link's line rate."""
    from paceline.accounting.collectives import bus_factor

    figure, axes = new_figure("Throughput of collectives", records)
    axes.set_xscale("log")
    axes.set_yscale("log")
    # Plain tick labels, even if all bandwidths lie within one decade.
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    has_line_rate = False
    for index, (name, chosen) in enumerate(split_series(records, "size_bytes").items()):
        color = COLORS[index % len(COLORS)]
        sizes = [case_number(record, "size_bytes") for record in chosen]
        metric = "algorithm_bandwidth_bytes_per_s"
        bandwidths = [record.metrics[metric].value / GB for record in chosen]
        axes.plot(sizes, bandwidths, "o-", color=color, label=name, ms=4)
        case = chosen[0].case
        link = find_link(case)
        factor = float(bus_factor(case["operation"], case_number(chosen[0], "world_size")))  # type: ignore[arg-type]
        has_line_rate = has_line_rate or link is not None
        # A single rank sends nothing, so no link limits it.
        if link is not None and factor > 0:
            ceiling = link.bytes_per_s / factor / GB
            ends = [sizes[0], sizes[-1]]
            axes.plot(ends, [ceiling] * 2, "--", color=color, label=f"{name}: line rate")
    if not has_line_rate:
        all_loopback = all(is_loopback(record.case) for record in records)
        reason = "loopback: no line rate" if all_loopback else "no line rate is known"
        text = f"{reason}, so no theoretical curve"
        inside = axes.transAxes
        axes.text(0.02, 0.98, text, transform=inside, va="top", fontsize="small", color=GRAY)
    low, high = axes.get_ylim()
    axes.set_ylim(low / _ROOM, high * _ROOM)
    axes.set_xlabel("message size (bytes)")
    axes.set_ylabel("algorithm bandwidth (GB/s)")
    # Outside the axes, because curves may lie anywhere inside.
    figure.legend(fontsize="small", loc="outside lower center", ncols=2)
    return figure
