"""Tables of predictions for runs: one run with its measurements, and a summary of all runs."""

from collections.abc import Callable, Sequence

from paceline.core.units import format_binary_bytes, format_duration, format_seconds
from paceline.predict.history import Coverage, HistoryEntry, Quantity
from paceline.reports.tables.table import Table
from paceline.reports.tables.terminal import NOT_APPLICABLE

WRITTEN: dict[Quantity, tuple[str, Callable[[float], str]]] = {
    "heldout_loss": ("held-out loss", "{:.4f}".format),
    "step_time_s": ("step time", format_seconds),
    "memory_bytes": ("rank memory", format_binary_bytes),
    "duration_s": ("duration", format_duration),
}
"""Display name and format of each quantity."""


def outcome_table(entries: Sequence[HistoryEntry], caption: str) -> Table:
    """Returns a row per quantity of a run: predicted, measured, error."""
    return Table(
        headers=("", "predicted", "90% interval", "measured", "error", "inside"),
        rows=tuple(_outcome_row(each) for each in entries),
        caption=caption,
    )


def _outcome_row(entry: HistoryEntry) -> tuple[str, ...]:
    name, written = WRITTEN[entry.quantity]
    predicted, inside = entry.predicted, entry.is_inside
    interval = NOT_APPLICABLE
    if predicted is not None and predicted.low is not None and predicted.high is not None:
        interval = between(written(predicted.low), written(predicted.high))
    return (
        name,
        NOT_APPLICABLE if predicted is None else written(predicted.value),
        interval,
        written(entry.measured),
        NOT_APPLICABLE if entry.error is None else f"{entry.error:+.1%}",
        NOT_APPLICABLE if inside is None else "yes" if inside else "no",
    )


def between(low: str, high: str) -> str:
    """Returns an interval as text, with a shared unit written only once."""
    (number, *unit), (_, *other) = low.split(), high.split()
    return f"{number if unit == other and len(unit) == 1 else low} to {high}"


def coverage_table(found: Sequence[Coverage], caption: str) -> Table:
    """Returns a row per predicted quantity: errors, and coverage of the intervals."""
    return Table(
        headers=("", "predictions", "median error", "largest error", "inside their 90% interval"),
        rows=tuple(
            (
                WRITTEN[each.quantity][0],
                str(each.num_predicted),
                f"{each.median_error:.1%}",
                f"{each.largest_error:.1%}",
                f"{each.num_inside} of {each.num_intervals}"
                if each.num_intervals
                else NOT_APPLICABLE,
            )
            for each in found
        ),
        caption=caption,
    )
