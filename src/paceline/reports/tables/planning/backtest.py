"""Table of predicted and measured step times by group, with errors and coverage."""

import collections
import statistics
from collections.abc import Iterator, Sequence

from paceline.predict.backtest import (
    COVERAGE,
    FEWEST_CASES,
    HeldOutPrediction,
    leave_group_out,
    summarize,
)
from paceline.reports.tables.table import Table

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
    summary = summarize(held_out)
    text = (
        f"{summary.num_cases} cases: the median of absolute errors is {summary.median_error:.1%}, "
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
    errors = [each.error for each in group]
    times = [each.case.measured_s * 1e3 for each in group]
    return (
        str(len(group)),
        f"{min(times):.0f} to {max(times):.0f}",
        f"{statistics.median(abs(error) for error in errors):.1%}",
        f"{max(errors, key=abs):+.1%}",
        f"{sum(each.is_covered is True for each in group)} of {len(group)}",
    )
