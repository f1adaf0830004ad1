"""Plot of a run's memory, with its prediction and limit."""

from matplotlib.figure import Figure

from paceline.core.units import format_binary_bytes
from paceline.reports.evidence.training_run import TrainingRun
from paceline.reports.plots.runs.lines import MEASURED, PREDICTED, run_figure, thinned
from paceline.reports.plots.style import GRAY, memory_unit

_FAR = 3.0
"""The axis includes the limit only if it is below this multiple of the largest other value."""


def plot_memory(run: TrainingRun) -> Figure | None:
    """Draws the memory of the first rank, its prediction and its limit; None without data."""
    seen = [(row.step, row.memory_bytes) for row in run.steps if row.memory_bytes is not None]
    if not seen:
        return None
    figure, axes = run_figure("Memory of the first rank", run)
    expected, most = run.expected, max(num_bytes for _, num_bytes in seen)
    unit, name = memory_unit(most)
    axes.plot(
        *thinned([step for step, _ in seen], [num_bytes / unit for _, num_bytes in seen]),
        "o-",
        color=MEASURED,
        markersize=3,
        label=f"in use, at most {format_binary_bytes(most)}",
    )
    predicted = expected.memory_bytes
    if predicted is not None:
        label = f"predicted for its tensors: {format_binary_bytes(predicted)}"
        axes.axhline(predicted / unit, color=PREDICTED, linestyle="--", label=label)
    limit = expected.memory_limit_bytes
    if limit is not None:
        axes.axhline(
            limit / unit, color=GRAY, linestyle=":", label=f"limit {format_binary_bytes(limit)}"
        )
    # A distant limit would flatten everything else, so it appears only in the legend.
    highest = max(most, predicted or 0)
    near = limit is not None and limit < _FAR * highest
    axes.set_ylim(0, 1.25 * (limit if near and limit is not None else highest) / unit)
    axes.set_ylabel(f"memory ({name})")
    axes.set_xlabel("step")
    axes.legend()
    return figure
