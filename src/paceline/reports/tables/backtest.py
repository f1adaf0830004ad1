"""Predicted steps beside measured ones: a table of groups, and how far to trust it."""

import collections
import statistics
from collections.abc import Iterator, Sequence

from paceline.prediction.backtest import (
    COVERAGE,
    FEWEST_CASES,
    Judgement,
    leave_group_out,
    summarize,
)
from paceline.reports.tables.table import Table

_GROUPED_BY = ("ranks", "link", "strategy")


def backtest_table(judgements: Sequence[Judgement], *, counted: int) -> Table:
    """Makes a table with a row for every strategy at every place, and one for all that count.

    Args:
        judgements: All cases, those that count first.
        counted: How many of them count.
    """
    groups: dict[tuple[str, ...], list[Judgement]] = {}
    for judgement in judgements:
        key = tuple(judgement.case.labels[label] for label in _GROUPED_BY)
        groups.setdefault(key, []).append(judgement)
    return Table(
        headers=(
            *_GROUPED_BY,
            *("cases", "measured (ms)", "median error", "largest error"),
            "inside interval",
        ),
        rows=(
            *((*key, *_summary(group)) for key, group in groups.items()),
            *((*("all", "", ""), *_summary(judgements[:counted])),),
        ),
        caption="Each case is predicted from a calibration and by what all other cases teach",
        notes=(verdict_text(judgements[:counted]), *_harder_verdicts(judgements[:counted])),
    )


def verdict_text(judgements: Sequence[Judgement]) -> str:
    """Says error and coverage in a sentence."""
    verdict = summarize(judgements)
    return (
        f"{verdict.num_cases} cases: the median of absolute errors is {verdict.median_error:.1%}, "
        f"nine in ten are below {verdict.ninetieth_error:.1%}; the {COVERAGE:.0%} interval, "
        f"±{verdict.median_width:.0%} wide, holds {verdict.coverage:.0%} of the measurements"
    )


def _harder_verdicts(judgements: Sequence[Judgement]) -> Iterator[str]:
    """Says how well cases are predicted by others that have less in common with them."""
    cases = [judgement.case for judgement in judgements]
    for label in ("model", "link"):
        sizes = collections.Counter(case.labels[label] for case in cases)
        if len(cases) - max(sizes.values()) >= FEWEST_CASES:
            yield (
                f"with all cases of a {label} left out together, "
                + verdict_text(leave_group_out(cases, label))
            )


def _summary(group: Sequence[Judgement]) -> tuple[str, ...]:
    errors = [judgement.error for judgement in group]
    times = [judgement.case.measured_s * 1e3 for judgement in group]
    return (
        str(len(group)),
        f"{min(times):.0f} to {max(times):.0f}",
        f"{statistics.median(abs(error) for error in errors):.1%}",
        f"{max(errors, key=abs):+.1%}",
        f"{sum(judgement.is_covered for judgement in group)} of {len(group)}",
    )
