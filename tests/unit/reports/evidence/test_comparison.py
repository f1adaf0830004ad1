"""Times are told apart by their samples, and by nothing else."""

import statistics
from collections.abc import Sequence

import pytest

from paceline.records import Metric
from paceline.reports.evidence.comparison import paired_ratio, unpaired_ratio

STEADY = (1.0, 0.999, 1.001, 1.0, 1.0, 1.0, 1.0)
NOISY = (0.8, 1.3, 1.0, 0.7, 1.1, 0.9, 1.2)


def _metric(seconds: float, spread: Sequence[float]) -> Metric:
    return Metric.from_samples([seconds * factor for factor in spread])


@pytest.mark.parametrize(
    ("spread", "ratio", "standing"),
    [
        (STEADY, 0.98, "less"),
        (STEADY, 1.02, "more"),
        (NOISY, 0.98, "alike"),
        (STEADY[:5], 0.5, "unknown"),
        ((1.0,), 0.5, "unknown"),
    ],
)
def test_a_ratio_is_judged_by_its_rounds(
    spread: Sequence[float], ratio: float, standing: str
) -> None:
    base = Metric.from_samples([1.0] * len(spread))
    found = paired_ratio(_metric(ratio, spread), base)
    assert found is not None
    assert found.standing == standing
    assert found.value == pytest.approx(ratio)


def test_rounds_that_were_slow_for_both_do_not_hide_a_difference() -> None:
    slow, base = _metric(1.03, NOISY), _metric(1.0, NOISY)
    paired, unpaired = paired_ratio(slow, base), unpaired_ratio(slow, base)
    assert paired is not None
    assert unpaired is not None
    assert (paired.standing, unpaired.standing) == ("more", "alike")


@pytest.mark.parametrize(
    ("subject", "standing"), [(1.03, "alike"), (0.97, "alike"), (1.2, "more"), (0.8, "less")]
)
def test_runs_one_after_the_other_may_drift(subject: float, standing: str) -> None:
    in_another_run = unpaired_ratio(_metric(subject, STEADY), _metric(1.0, STEADY))
    in_other_numbers = paired_ratio(_metric(subject, STEADY), _metric(1.0, STEADY[:6]))
    for found in (in_another_run, in_other_numbers):
        assert found is not None
        assert found.standing == standing


def test_nothing_is_divided_by_zero() -> None:
    assert paired_ratio(Metric(value=1.0), Metric(value=0.0)) is None
    assert unpaired_ratio(Metric(value=1.0), Metric(value=0.0)) is None


def test_an_interval_covers_the_median_as_often_as_it_says() -> None:
    # Of 30 values, the tenth and the tenth from the end hold the median with 95.7%.
    values = [float(number) for number in range(1, 31)]
    found = paired_ratio(Metric.from_samples(values), Metric.from_samples([1.0] * 30))
    assert found is not None
    assert (found.low, found.high, found.value) == (10.0, 21.0, statistics.median(values))


@pytest.mark.parametrize(
    ("num_samples", "text", "judged"),
    [
        (1, "0.5 times", "judged by one round only"),
        (2, "0.5 times (0.5 to 0.5)", "judged by 2 rounds only"),
    ],
)
def test_what_few_samples_say_is_left_to_the_reader(
    num_samples: int, text: str, judged: str
) -> None:
    found = paired_ratio(
        Metric.from_samples([0.5] * num_samples), Metric.from_samples([1.0] * num_samples)
    )
    assert found is not None
    assert (found.describe(), found.judged_by("round")) == (text, judged)
