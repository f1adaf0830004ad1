"""Whether measured figures differ by more than their samples do."""

from paceline.records import Metric

_DEVIATIONS = 2.0
"""A difference of more than this many standard deviations is not taken for noise."""


def stands_out(value: float, metric: Metric) -> bool | None:
    """Whether a value lies outside of a metric's samples; None where their spread is not known."""
    if metric.std is None:
        return None
    return abs(value - metric.value) > _DEVIATIONS * metric.std


def differ(first: Metric, second: Metric) -> bool | None:
    """Whether two medians lie further apart than their samples; None where that is not known."""
    if first.std is None or second.std is None:
        return None
    return abs(first.value - second.value) > _DEVIATIONS * max(first.std, second.std)
