"""Plot of the time of a traced step by phase and kind of work."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from paceline.core.units import format_seconds
from paceline.records import Record
from paceline.reports.plots.style import COLORS, GRAY, add_label, blank_figure

_PHASES = ("forward", "backward", "optimizer")
_REST = "the rest"
_HATCHES = ("", "///", "...", "\\\\\\", "xxx", "")
"""Distinguish kinds of work in greyscale."""


def plot_work(kinds: Sequence[Record], subject: str) -> Figure:
    """Draws a bar per phase of one step, divided by kind of work."""
    phases = [phase for phase in _PHASES if any(each.case["range"] == phase for each in kinds)]
    figure = blank_figure("Time of one step by kind of work", (8.0, 1.8 + 0.6 * len(phases)))
    axes = figure.subplots()
    # A dollar sign in a name must not start a formula.
    axes.set_title(subject, fontsize="x-small", color=GRAY, parse_math=False)
    ends = dict.fromkeys(phases, 0.0)
    for index, (name, by_phase) in enumerate(_stack(kinds, phases).items()):
        axes.barh(
            phases,
            [by_phase[phase] * 1e3 for phase in phases],
            left=[ends[phase] * 1e3 for phase in phases],
            height=0.65,
            color=COLORS[index],
            hatch=_HATCHES[index],
            edgecolor="white",
            linewidth=0.5,
            label=name,
        )
        for phase in phases:
            ends[phase] += by_phase[phase]
    for place, phase in enumerate(phases):
        end = (ends[phase] * 1e3, place)
        add_label(axes, format_seconds(ends[phase]), end, (4, 0), va="center")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("own time of operators (ms)")
    axes.set_ylabel("phase")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    return figure


def _stack(kinds: Sequence[Record], phases: Sequence[str]) -> dict[str, dict[str, float]]:
    """Returns seconds by kind of work and phase, longest first, with small kinds merged."""
    seconds: dict[str, dict[str, float]] = {}
    for record in kinds:
        by_phase = seconds.setdefault(str(record.case["work"]), dict.fromkeys(phases, 0.0))
        if record.case["range"] in phases:
            by_phase[str(record.case["range"])] += record.metrics["own_time_s"].value
    ordered = sorted(seconds.items(), key=lambda item: -sum(item[1].values()))
    num_named = len(COLORS) if len(ordered) <= len(COLORS) else len(COLORS) - 1
    stack = dict(ordered[:num_named])
    if rest := [by_phase for _kind, by_phase in ordered[num_named:]]:
        stack[_REST] = {phase: sum(by_phase[phase] for by_phase in rest) for phase in phases}
    return stack
