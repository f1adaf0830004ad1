"""Pictures of records, each as PNG and as SVG.

A picture's subtitle holds what all its records share, so that it can be read away from the
page it was made for. Files are reproducible: the same records give the same bytes.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError
from paceline.core.units import MIB
from paceline.records import Metric, Record
from paceline.reports.selection import describe_case, describe_fields, split_fields

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PHASES = {
    "forward": "forward_time_s",
    "backward": "backward_time_s",
    "optimizer": "optimizer_time_s",
}
_COLORS = ("#3b6fb6", "#d97b29", "#4c9a5b", "#9a4c7a", "#6b6b6b", "#b8a13a")
_SIZE_INCHES = (8.0, 4.8)
_SUBTITLE_CHARACTERS = 110


def plot_step_time(records: Sequence[Record]) -> "Figure":
    """Draws the phases of each step side by side, with the deviation of the samples."""
    figure, axes = _new_figure("Time of one training step by phase", records)
    _phase_bars(axes, records)
    axes.set_ylabel("time (ms), median ± standard deviation")
    return figure


def plot_warmup(records: Sequence[Record]) -> "Figure":
    """Draws every sample by the number of warm-up steps, and mean and deviation over them."""
    figure, axes = _new_figure("What warm-up does to a measurement", records, apart=("warmup",))
    counts = sorted({int(record.case["warmup"] or 0) for record in records})
    models = list(dict.fromkeys(str(record.case["model"]) for record in records))
    for index, model in enumerate(models):
        chosen = [record for record in records if record.case["model"] == model]
        chosen.sort(key=lambda record: int(record.case["warmup"] or 0))
        offset = (index - (len(models) - 1) / 2) * 0.18
        places = [counts.index(int(record.case["warmup"] or 0)) + offset for record in chosen]
        steps = [record.metrics["step_time_s"] for record in chosen]
        color = _COLORS[index]
        for place, step in zip(places, steps, strict=True):
            samples = [value * 1e3 for value in step.samples]
            axes.plot([place] * len(samples), samples, "o", ms=4, alpha=0.35, color=color)
        axes.errorbar(
            [place + 0.05 for place in places],
            [(step.mean or step.value) * 1e3 for step in steps],
            yerr=[(step.std or 0.0) * 1e3 for step in steps],
            fmt="s",
            capsize=4,
            color=color,
            label=f"{model}: mean ± standard deviation",
        )
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    axes.set_xlabel("warm-up steps before the first sample")
    axes.set_ylabel("step time (ms)")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def plot_precision(records: Sequence[Record]) -> "Figure":
    """Draws the phases of each step by number format."""
    figure, axes = _new_figure("Number formats compared", records)
    _phase_bars(axes, records)
    axes.set_ylabel("time (ms), median ± standard deviation")
    return figure


def plot_attention_time(records: Sequence[Record]) -> "Figure":
    """Draws both passes by sequence length, one colour per head width, on log axes."""
    figure, axes = _attention_axes("Attention that stores its scores: time", records)
    for color, head_dim, chosen in _by_head_dim(records):
        for metric, style in (("forward_time_s", "o-"), ("backward_time_s", "s--")):
            name = metric.removesuffix("_time_s")
            _line(axes, chosen, metric, 1e3, style, color, f"{name}, d {head_dim}")
    axes.set_ylabel("time (ms)")
    axes.legend(fontsize="small", ncols=2)
    return figure


def plot_attention_memory(records: Sequence[Record]) -> "Figure":
    """Draws the memory kept for backward and the peak by sequence length, on log axes."""
    figure, axes = _attention_axes("Attention that stores its scores: memory", records)
    for color, head_dim, chosen in _by_head_dim(records):
        for metric, style, name in (
            ("saved_for_backward_bytes", "o-", "saved for backward"),
            ("peak_bytes", "s--", "peak"),
        ):
            _line(axes, chosen, metric, 1 / MIB, style, color, f"{name}, d {head_dim}")
    axes.set_ylabel("memory (MiB)")
    axes.legend(fontsize="small", ncols=2)
    return figure


# Each plot with the kind of record it draws and the field that must vary for it to make sense.
PLOTS: dict[str, tuple[str, str | None, Callable[[Sequence[Record]], "Figure"]]] = {
    "step-time": ("step", None, plot_step_time),
    "warmup": ("step", "warmup", plot_warmup),
    "precision": ("step", "precision", plot_precision),
    "attention-time": ("attention", "context", plot_attention_time),
    "attention-memory": ("attention", "context", plot_attention_memory),
}


def drawable_plots(records: Sequence[Record]) -> list[str]:
    """Returns the plots for which there are records, and values to compare."""
    names = []
    for name, (kind, field, _draw) in PLOTS.items():
        chosen = _measured(records, kind)
        if chosen and (field is None or len({record.case[field] for record in chosen}) > 1):
            names.append(name)
    return names


def draw(name: str, records: Sequence[Record]) -> "Figure":
    """Draws one of `PLOTS` from those of the records that it is about."""
    kind, _field, plot = PLOTS[name]
    if not _measured(records, kind):
        raise UsageError(f"nothing to draw for {name!r}: the store has no {kind!r} measurements")
    return plot([record for record in records if record.kind == kind])


def save_figure(figure: "Figure", directory: pathlib.Path, name: str) -> list[pathlib.Path]:
    """Writes the figure as PNG and SVG and returns both paths."""
    import matplotlib

    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{name}.{suffix}" for suffix in ("png", "svg")]
    # Without these, every SVG would differ from the last by its date and random identifiers.
    with matplotlib.rc_context({"svg.hashsalt": "paceline"}):
        figure.savefig(paths[0], dpi=150, metadata={"Software": None})
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _measured(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record.kind == kind and record.metrics]


def _new_figure(
    title: str, records: Sequence[Record], apart: Sequence[str] = ()
) -> tuple["Figure", "Axes"]:
    import textwrap

    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    shared, _varying = split_fields(records)
    shared = {field: value for field, value in shared.items() if field not in apart}
    subtitle = textwrap.fill(describe_fields(shared), _SUBTITLE_CHARACTERS)
    figure.suptitle(title, fontweight="bold")
    axes.set_title(subtitle, fontsize="x-small", color="#444444")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def _phase_bars(axes: "Axes", records: Sequence[Record]) -> None:
    _shared, varying = split_fields(records)
    width = 0.8 / len(_PHASES)
    for index, (phase, metric) in enumerate(_PHASES.items()):
        places = [place for place, record in enumerate(records) if metric in record.metrics]
        chosen = [records[place].metrics[metric] for place in places]
        if not chosen:
            continue
        axes.bar(
            [place + (index - 1) * width for place in places],
            [value.value * 1e3 for value in chosen],
            width,
            yerr=[_deviation(value) * 1e3 for value in chosen],
            capsize=3,
            color=_COLORS[index],
            label=phase,
        )
    for place, record in enumerate(records):
        if not record.metrics:
            outcome = record.outcome.replace("_", " ")
            axes.annotate(
                outcome, (place, 0), (0, 6), textcoords="offset points", rotation=90, ha="center"
            )
    axes.set_xticks(
        range(len(records)), [describe_case(record, varying, "\n") for record in records]
    )
    axes.set_xlim(-0.6, len(records) - 0.4)
    axes.legend()


def _deviation(metric: Metric) -> float:
    return metric.std or 0.0


def _attention_axes(title: str, records: Sequence[Record]) -> tuple["Figure", "Axes"]:
    figure, axes = _new_figure(title, records)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({int(record.case["context"] or 0) for record in records})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_xlabel("sequence length (tokens)")
    unmeasured = {
        int(record.case["context"] or 0): record.outcome.replace("_", " ")
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
    return figure, axes


def _by_head_dim(records: Sequence[Record]) -> list[tuple[str, int, list[Record]]]:
    widths = sorted({int(record.case["head_dim"] or 0) for record in records})
    return [
        (
            _COLORS[index % len(_COLORS)],
            width,
            sorted(
                (
                    record
                    for record in records
                    if record.case["head_dim"] == width and record.metrics
                ),
                key=lambda record: int(record.case["context"] or 0),
            ),
        )
        for index, width in enumerate(widths)
    ]


def _line(
    axes: "Axes",
    records: Sequence[Record],
    metric: str,
    scale: float,
    style: str,
    color: str,
    label: str,
) -> None:
    chosen = [record for record in records if metric in record.metrics]
    axes.plot(
        [int(record.case["context"] or 0) for record in chosen],
        [record.metrics[metric].value * scale for record in chosen],
        style,
        color=color,
        label=label,
        ms=4,
    )
