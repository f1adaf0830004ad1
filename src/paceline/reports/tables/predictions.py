"""Tables of predicted beside measured figures: of a run, of all runs, and of held-out steps."""

import collections
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from paceline.accounting.intervals import COVERAGE
from paceline.core.units import format_binary_bytes, format_duration, format_seconds
from paceline.predict.backtest import (
    FEWEST_CASES,
    Accuracy,
    HeldOutPrediction,
    accuracy,
    leave_group_out,
)
from paceline.predict.history import HistoryEntry, Quantity
from paceline.records import Metric, Record, join_key
from paceline.records.kinds import PREDICTION
from paceline.reports.tables.table import NOT_APPLICABLE, Table

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


def coverage_table(found: Mapping[Quantity, Accuracy], caption: str) -> Table:
    """Returns a row per predicted quantity: errors, and coverage of the intervals."""
    return Table.of(
        found.items(),
        {
            "": lambda item: WRITTEN[item[0]][0],
            "predictions": lambda item: item[1].num_predicted,
            "median error": lambda item: f"{item[1].median_error:.1%}",
            "largest error": lambda item: f"{item[1].largest_error:.1%}",
            "inside their 90% interval": lambda item: _coverage(item[1]),
        },
        caption=caption,
    )


def _coverage(found: Accuracy) -> str:
    intervals = found.num_intervals
    return f"{found.num_inside} of {intervals}" if intervals else NOT_APPLICABLE


_GROUPED_BY = ("ranks", "link", "strategy")


def backtest_table(held_out: Sequence[HeldOutPrediction], *, counted: int) -> Table:
    """Returns a row per number of ranks, link and strategy, and one for all counted cases.

    Only the first `counted` cases enter the summary. Predictions without intervals get a row per
    case instead.
    """
    if any(each.predicted.low is None for each in held_out):
        return _cases_table(held_out)
    groups: dict[tuple[str, ...], list[HeldOutPrediction]] = {}
    for each in held_out:
        key = tuple(each.case.labels[label] for label in _GROUPED_BY)
        groups.setdefault(key, []).append(each)
    return Table(
        headers=(
            *_GROUPED_BY,
            *("cases", "measured (ms)", "median error", "largest error", "inside interval"),
        ),
        rows=(
            *((*key, *_summary(group)) for key, group in groups.items()),
            ("all", "", "", *_summary(held_out[:counted])),
        ),
        caption="Each case is predicted from a calibration and corrected by all other cases",
        notes=(summary_text(held_out[:counted]), *_harder_summaries(held_out[:counted])),
    )


def _cases_table(held_out: Sequence[HeldOutPrediction]) -> Table:
    """Returns a row per case, for predictions without intervals."""
    return Table(
        headers=("model", "batch", *_GROUPED_BY, "predicted", "measured", "error"),
        rows=tuple(
            (
                each.case.labels["model"],
                f"{each.case.labels['batch']} x {each.case.labels['context']}",
                *(each.case.labels[label] for label in _GROUPED_BY),
                f"{each.predicted.value * 1e3:.1f}",
                f"{each.case.measured_s * 1e3:.1f}",
                f"{each.error:+.1%}",
            )
            for each in held_out
        ),
        caption="Step time in milliseconds, as predicted from the calibration and as measured",
        notes=(
            f"no intervals: with more than {FEWEST_CASES} cases, each is corrected by the others "
            "and gets one",
        ),
    )


def summary_text(held_out: Sequence[HeldOutPrediction]) -> str:
    """Returns error and coverage as a sentence."""
    summary = accuracy(held_out)
    text = (
        f"{len(held_out)} cases: the median of absolute errors is {summary.median_error:.1%}, "
        f"nine in ten are below {summary.ninetieth_error:.1%}"
    )
    if summary.coverage is None:
        return text
    return text + (
        f"; the {COVERAGE:.0%} interval, ±{summary.median_width:.0%} wide, holds "
        f"{summary.coverage:.0%} of the measurements"
    )


def _harder_summaries(held_out: Sequence[HeldOutPrediction]) -> Iterator[str]:
    """Yields the accuracy with whole groups held out: all cases of a model, or of a link."""
    cases = [each.case for each in held_out]
    for label in ("model", "link"):
        sizes = collections.Counter(case.labels[label] for case in cases)
        if len(cases) - max(sizes.values()) >= FEWEST_CASES:
            yield (
                f"with all cases of a {label} left out together, "
                + summary_text(leave_group_out(cases, label))
            )


def _summary(group: Sequence[HeldOutPrediction]) -> tuple[str, ...]:
    errors = [each.error for each in group if each.error is not None]
    times = [each.case.measured_s * 1e3 for each in group]
    return (
        str(len(group)),
        f"{min(times):.0f} to {max(times):.0f}",
        f"{statistics.median(abs(error) for error in errors):.1%}",
        f"{max(errors, key=abs):+.1%}",
        f"{sum(each.is_inside is True for each in group)} of {len(group)}",
    )


def with_predictions(measured: Sequence[Record], records: Sequence[Record]) -> list[Record]:
    """Adds the predictions among `records` to the measurements of the same cases.

    For each metric ``x`` with a prediction, adds ``predicted_x`` and ``x_error``, the relative
    error of the prediction.
    """
    predictions = {join_key(record): record for record in records if record.kind == PREDICTION}
    return [_beside(record, predictions.get(join_key(record))) for record in measured]


def _beside(record: Record, prediction: Record | None) -> Record:
    if prediction is None or not record.metrics:
        return record
    added: dict[str, Metric] = {}
    for name, predicted in prediction.metrics.items():
        if name in record.metrics:
            added[f"predicted_{name}"] = Metric(value=predicted.value)
            if actual := record.metrics[name].value:
                added[f"{name}_error"] = Metric(value=predicted.value / actual - 1)
    return msgspec.structs.replace(record, metrics={**record.metrics, **added})
