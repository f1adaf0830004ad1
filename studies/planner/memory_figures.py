"""Peak memory against predictions: published peaks, and those of an accelerator's allocator.

From the records of `memory.py` and `device_memory.py`.
"""

import statistics
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from paceline.core.units import GIB
from paceline.records import Record
from paceline.reports.plots.style import COLORS, GRAY, add_grid, blank_figure
from paceline.reports.tables.table import Table

_ALL = "all that "
_LIMIT = 0.06


def published_memory_table(records: Sequence[Record]) -> Table:
    """Returns a row per framework: errors of peaks, and counts of correct fit verdicts."""
    rows = []
    for framework in dict.fromkeys(str(record.case["framework"]) for record in records):
        own = [record for record in records if record.case["framework"] == framework]
        errors = [abs(relative_error(record)) for record in own if "peak_bytes" in record.metrics]
        ran, failed = (_verdicts(own, outcome) for outcome in ("ran", "out of memory"))
        rows.append(
            (
                framework,
                str(len(errors)) if errors else "",
                *(
                    (f"{statistics.median(errors):.1%}", f"{statistics.mean(errors):.1%}")
                    if errors
                    else ("", "")
                ),
                f"{max(errors):.1%}" if errors else "",
                f"{sum(error <= _LIMIT for error in errors)}" if errors else "",
                f"{ran.get('fits', 0):,} of {ran.get('fits', 0) + ran.get('refused', 0):,}",
                f"{failed.get('refused', 0)} of {sum(failed.values())}" if failed else "",
            )
        )
    rows.sort(key=lambda row: (not row[1], row[0]))
    return Table(
        headers=(
            *("framework", "peaks", "median error", "mean", "largest", f"within {_LIMIT:.0%}"),
            *("runs that ran, said to fit", "runs out of memory, said so"),
        ),
        rows=tuple(rows),
        caption="peak memory of a device, predicted with the row's model left out of every fit",
    )


def relative_error(record: Record) -> float:
    """Returns the relative error of the predicted peak."""
    return record.metrics["predicted_bytes"].value / record.metrics["peak_bytes"].value - 1


def _verdicts(records: Sequence[Record], outcome: str) -> dict[str, int]:
    return {
        str(record.case["verdict"]): int(record.metrics["rows"].value)
        for record in records
        if record.case["run"] == _ALL + outcome
    }


def device_memory_table(records: Sequence[Record]) -> Table:
    """Returns a row per strategy or mesh: forecast peaks over those of an allocator."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for record in records:
        key = (str(record.case["strategy"]), str(record.case["layout"]))
        peak = record.metrics["peak_bytes"].value
        ratios.setdefault(key, []).append(record.metrics["predicted_bytes"].value / peak)
    rows = [
        (strategy if not mesh else f"{_in_words(mesh)}, {strategy}", *_ratio_fields(own))
        for (strategy, mesh), own in ratios.items()
    ]
    together = [ratio for own in ratios.values() for ratio in own]
    rows.append(("all", *_ratio_fields(together)))
    return Table(
        headers=("strategy or mesh", "cases", "median", "farthest from 1"),
        rows=tuple(rows),
        caption="forecast peak of a step over the peak of the emulated accelerator's allocator",
    )


def _in_words(mesh: str) -> str:
    return mesh.replace("sequence_parallel 1", "with sequence parallelism")


def _ratio_fields(ratios: Sequence[float]) -> tuple[str, str, str]:
    farthest = max(ratios, key=lambda ratio: abs(ratio - 1))
    return str(len(ratios)), f"{statistics.median(ratios):.4f}", f"{farthest:.4f}"


_NAMES = {"bloom": "BLOOM (Megatron-DeepSpeed), A100 80 GB", "torchtitan": "torchtitan, H100, H200"}


def plot_published_memory(records: Sequence[Record]) -> Figure:
    """Draws predicted against published peaks, including runs that ran out of memory."""
    figure = blank_figure("Peak memory of a device, predicted with its model held out")
    axes = figure.subplots()
    ends = np.array([25.0, 100.0])
    axes.plot(ends, ends, color=GRAY, lw=0.8)
    axes.fill_between(ends, 0.94 * ends, 1.06 * ends, color=GRAY, alpha=0.15, lw=0, label="±6%")
    for number, (framework, name) in enumerate(_NAMES.items()):
        own = [record for record in records if record.case["framework"] == framework]
        peaks = [record.metrics for record in own if "peak_bytes" in record.metrics]
        axes.plot(
            [metrics["peak_bytes"].value / GIB for metrics in peaks],
            [metrics["predicted_bytes"].value / GIB for metrics in peaks],
            *("os"[number],),
            color=COLORS[number],
            ms=4.5,
            alpha=0.7,
            label=name,
        )
        failed = [
            record.metrics
            for record in own
            if record.case["outcome"] == "out of memory" and "capacity_bytes" in record.metrics
        ]
        if failed:
            axes.plot(
                [metrics["capacity_bytes"].value / GIB for metrics in failed],
                [metrics["predicted_bytes"].value / GIB for metrics in failed],
                "x",
                color=COLORS[3],
                ms=7,
                label="went out of memory, at the capacity",
            )
            capacity = failed[0]["capacity_bytes"].value / GIB
            axes.axhline(capacity, color=COLORS[3], lw=0.8, ls="--")
    add_grid(axes, "both")
    axes.set_xlabel("published peak (GiB)")
    axes.set_ylabel("predicted peak (GiB)")
    axes.legend(fontsize="small", frameon=False, loc="upper left")
    return figure
