"""Plots of training steps: time by phase and by kind of work, and the effect of warm-up."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from paceline.core.units import format_seconds
from paceline.records import Record
from paceline.reports.fields import case_number, describe_case, split_fields, split_series
from paceline.reports.plots.style import (
    COLORS,
    GRAY,
    PHASE_COLORS,
    add_label,
    blank_figure,
    new_figure,
    stack_bars,
)

_PHASES = ("forward", "backward", "optimizer")


def plot_step_time(by: str, records: Sequence[Record]) -> Figure:
    """Draws the phases of each step side by side, with standard deviations."""
    figure, axes = new_figure(f"Time of one training step by {by}", records)
    _shared, varying = split_fields(records)
    width = 0.8 / len(_PHASES)
    for index, phase in enumerate(_PHASES):
        metric = f"{phase}_time_s"
        positions = [
            position for position, record in enumerate(records) if metric in record.metrics
        ]
        chosen = [records[position].metrics[metric] for position in positions]
        if not chosen:
            continue
        axes.bar(
            [position + (index - 1) * width for position in positions],
            [value.value * 1e3 for value in chosen],
            width,
            # Clip error bars at zero: times are never negative.
            yerr=[
                [min(value.std or 0.0, value.value) * 1e3 for value in chosen],
                [(value.std or 0.0) * 1e3 for value in chosen],
            ],
            capsize=3,
            color=PHASE_COLORS[phase],
            label=phase,
        )
    for position, record in enumerate(records):
        if not record.metrics:
            outcome = record.outcome.replace("_", " ")
            add_label(axes, outcome, (position, 0), (0, 6), rotation=90, ha="center")
    names = [describe_case(record, varying, "\n") for record in records]
    axes.set_xticks(range(len(records)), names)
    axes.set_xlim(-0.6, len(records) - 0.4)
    axes.legend()
    axes.set_ylabel("time (ms), median ± standard deviation")
    return figure


def plot_warmup(records: Sequence[Record]) -> Figure:
    """Draws every sample by number of warm-up steps, with mean and standard deviation."""
    figure, axes = new_figure("What warm-up does to a measurement", records)
    series = split_series(records, "warmup")
    counts = sorted(
        {case_number(record, "warmup") for chosen in series.values() for record in chosen}
    )
    for index, (name, chosen) in enumerate(series.items()):
        offset = (index - (len(series) - 1) / 2) * 0.18
        positions = [counts.index(case_number(record, "warmup")) + offset for record in chosen]
        steps = [record.metrics["step_time_s"] for record in chosen]
        color = COLORS[index % len(COLORS)]
        for position, step in zip(positions, steps, strict=True):
            samples = [value * 1e3 for value in step.samples]
            axes.plot([position] * len(samples), samples, "o", ms=4, alpha=0.35, color=color)
        axes.errorbar(
            [position + 0.05 for position in positions],
            [(step.mean or step.value) * 1e3 for step in steps],
            yerr=[(step.std or 0.0) * 1e3 for step in steps],
            fmt="s",
            capsize=4,
            color=color,
            label=f"{name}: mean ± standard deviation",
        )
    axes.set_xticks(range(len(counts)), [f"{count:g}" for count in counts])
    axes.set(
        xlabel="warm-up steps before the first sample", ylabel="step time (ms)", ylim=(0, None)
    )
    axes.legend()
    return figure


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
    milliseconds = {
        name: [by_phase[phase] * 1e3 for phase in phases]
        for name, by_phase in _stack(kinds, phases).items()
    }
    styles = dict(zip(milliseconds, zip(COLORS, _HATCHES, strict=True), strict=False))
    ends = stack_bars(axes, phases, milliseconds, styles, 0.65, edgecolor="white", linewidth=0.5)
    for position, end in enumerate(ends):
        add_label(axes, format_seconds(end / 1e3), (end, position), (4, 0), va="center")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(xlim=(0, None), xlabel="own time of operators (ms)", ylabel="phase")
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
