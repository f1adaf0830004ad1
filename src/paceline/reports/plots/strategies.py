"""Plots of step time by strategy, and of exposed communication by bucket size."""

import statistics
from collections.abc import Sequence

from matplotlib.figure import Figure

from paceline.core.units import MIB
from paceline.records import Record
from paceline.records.kinds import PREDICTION
from paceline.reports.evidence.fields import case_number, split_fields, split_series, strategy_case
from paceline.reports.evidence.strategies import EXPOSED
from paceline.reports.plots.style import COLORS, GRAY, PHASE_COLORS, new_figure

_SAMPLES_WITH_QUARTILES = 4


def plot_strategies(records: Sequence[Record]) -> Figure:
    """Draws a bar per strategy, divided into phases."""
    chosen = [record for record in records if record.kind != PREDICTION and record.metrics]
    figure, axes = new_figure("One training step by strategy", chosen)
    _shared, varying = split_fields(chosen)
    figure.set_figheight(1.8 + 0.32 * len(chosen))
    places = range(len(chosen))
    left = [0.0] * len(chosen)
    for name, color in PHASE_COLORS.items():
        metric = EXPOSED if name == "exposed communication" else f"{name}_time_s"
        # Strategies that all-gather parameters do not separate communication from backward.
        known = [record.metrics.get(metric) for record in chosen]
        widths = [0.0 if value is None else value.value * 1e3 for value in known]
        axes.barh(places, widths, left=left, color=color, label=name, height=0.7)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(places, [strategy_case(record, varying) for record in chosen])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("time (ms), median of each phase")
    figure.legend(fontsize="small", loc="outside lower center", ncols=4)
    return figure


def plot_bucket_size(records: Sequence[Record]) -> Figure:
    """Draws exposed communication by bucket size: measured, predicted, and sqrt(s w o)."""
    from paceline.accounting.overlap import balanced_bucket_bytes

    sized = [
        record for record in records if isinstance(record.case.get("bucket_size_mb"), int | float)
    ]
    measured = [record for record in sized if record.kind != PREDICTION and record.metrics]
    # A store may hold other predictions for the same steps that have only a step time.
    predicted = [
        record for record in sized if record.kind == PREDICTION and EXPOSED in record.metrics
    ]
    figure, axes = new_figure("Exposed communication by bucket size", measured)
    axes.set_xscale("log")
    for index, (name, chosen) in enumerate(split_series(measured, "bucket_size_mb").items()):
        axes.errorbar(
            [case_number(record, "bucket_size_mb") for record in chosen],
            [record.metrics[EXPOSED].value * 1e3 for record in chosen],
            yerr=list(zip(*(_distances_to_quartiles(record) for record in chosen), strict=True)),
            fmt="o-",
            ms=5,
            capsize=3,
            color=COLORS[index % len(COLORS)],
            label=f"{name}: measured, median and quartiles",
        )
    if predicted:
        predicted.sort(key=lambda record: case_number(record, "bucket_size_mb"))
        axes.plot(
            [case_number(record, "bucket_size_mb") for record in predicted],
            [record.metrics[EXPOSED].value * 1e3 for record in predicted],
            "--",
            color=GRAY,
            label="bucketed: predicted by the recurrence",
        )
        metrics = predicted[0].metrics
        if "algorithm_bandwidth_bytes_per_s" in metrics:
            best = balanced_bucket_bytes(
                total_bytes=metrics["gradient_bytes"].value,
                bytes_per_s=metrics["algorithm_bandwidth_bytes_per_s"].value,
                latency_s=metrics["latency_s"].value,
            )
            label = f"sqrt(s w o) = {best / MIB:.2g} MiB"
            axes.axvline(best / MIB, color=COLORS[3], linestyle=":", label=label)
    axes.set_xlabel("bucket size (MiB)")
    axes.set_ylabel("exposed communication (ms)")
    axes.set_ylim(bottom=0)
    figure.legend(fontsize="small", loc="outside lower center", ncols=2)
    return figure


def _distances_to_quartiles(record: Record) -> tuple[float, float]:
    metric = record.metrics[EXPOSED]
    if len(metric.samples) < _SAMPLES_WITH_QUARTILES:
        return 0.0, 0.0
    low, median, high = statistics.quantiles(metric.samples, n=4)
    return (median - low) * 1e3, (high - median) * 1e3
