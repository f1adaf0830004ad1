"""Tests of backtests: the factors fitted to cases, and the coverage of intervals."""

import dataclasses

import numpy as np
import pytest

from paceline.core import UsageError
from paceline.predict.backtest import (
    GROUPS,
    BacktestCase,
    accuracy,
    fit_correction,
    leave_group_out,
    leave_one_out,
)

FACTORS = {"matmul": 1.2, "elementwise": 0.7, "update": 1.5, "contention": 1.0, "exposed": 0.8}


def _cases(number: int, noise: float, seed: int = 0) -> list[BacktestCase]:
    """Returns cases whose predicted terms are wrong by `FACTORS`, measured with noise."""
    rng = np.random.default_rng(seed)
    cases = []
    for _ in range(number):
        terms = {term: float(rng.lognormal(0, 1)) for group in GROUPS.values() for term in group}
        truth = sum(
            FACTORS[name] * sum(terms[term] for term in group) for name, group in GROUPS.items()
        )
        measured = truth * float(np.exp(noise * rng.standard_normal()))
        cases.append(BacktestCase(labels={}, terms=terms, measured_s=measured))
    return cases


def test_factors_are_found() -> None:
    correction = fit_correction(_cases(200, noise=0.01))
    assert correction.factors == pytest.approx(FACTORS, rel=0.05)


def test_without_noise_nothing_is_left() -> None:
    summary = accuracy(leave_one_out(_cases(100, noise=0.0)))
    assert summary.ninetieth_error < 0.02
    assert summary.median_width is not None
    assert summary.median_width < 0.03


def test_few_cases_draw_factors_little() -> None:
    # All cases consist of one term, so they carry no information about the others.
    cases = [
        BacktestCase(
            labels={},
            terms={term: 0.0 for group in GROUPS.values() for term in group} | {"matmul_s": 1.0},
            measured_s=1.3,
        )
        for _ in range(12)
    ]
    factors = fit_correction(cases).factors
    assert factors["matmul"] == pytest.approx(1.3, rel=0.01)
    assert factors["exposed"] == pytest.approx(1.0)


def test_intervals_hold_what_they_promise() -> None:
    covered = [
        accuracy(leave_one_out(_cases(60, noise=0.1, seed=seed))).coverage or 0.0
        for seed in range(20)
    ]
    assert 0.87 <= float(np.mean(covered)) <= 0.95


def test_the_interval_is_that_of_cases_predicted_without_themselves() -> None:
    cases = _cases(15, noise=0.05)
    errors = []
    for index, case in enumerate(cases):
        others = fit_correction([*cases[:index], *cases[index + 1 :]])
        predicted = others.apply(case.terms).value
        errors.append(abs(np.log(predicted / case.measured_s)))
    # The conformal 90% quantile of 15 errors: number ceil(0.9 * 16) = 15.
    assert fit_correction(cases).log_error == pytest.approx(sorted(errors)[14])


def test_a_case_does_not_judge_itself() -> None:
    cases = _cases(40, noise=0.01)
    odd = BacktestCase(labels={}, terms=cases[0].terms, measured_s=10 * cases[0].measured_s)
    (found,) = [each for each in leave_one_out([odd, *cases[1:]]) if each.case is odd]
    assert found.error == pytest.approx(-0.9, abs=0.02)
    assert not found.is_inside


def test_a_group_does_not_judge_itself() -> None:
    plain, odd = (
        [dataclasses.replace(case, labels={"model": name}) for case in _cases(20, 0.01, seed)]
        for name, seed in (("plain", 1), ("odd", 2))
    )
    odd = [dataclasses.replace(case, measured_s=2 * case.measured_s) for case in odd]
    found = leave_group_out([*plain, *odd], "model")
    assert [each.case.labels["model"] for each in found] == ["plain"] * 20 + ["odd"] * 20
    for each in found[20:]:
        assert each.error == pytest.approx(-0.5, abs=0.05)


def test_too_few_cases_give_no_correction() -> None:
    with pytest.raises(UsageError, match=r"3 measured cases are too few.*besides the one"):
        fit_correction(_cases(3, noise=0.1))


@pytest.mark.parametrize("number", [1, 2, 10])
def test_few_cases_are_predicted_without_intervals(number: int) -> None:
    cases = _cases(number, noise=0.1)
    for found, case in zip(leave_one_out(cases), cases, strict=True):
        assert found.predicted.value == pytest.approx(sum(case.terms.values()))
        assert found.error == pytest.approx(sum(case.terms.values()) / case.measured_s - 1)
        assert (found.predicted.low, found.is_inside) == (None, None)
    summary = accuracy(leave_one_out(cases))
    assert (summary.num_predicted, summary.coverage, summary.median_width) == (number, None, None)
    # With 11 cases, every case has ten others.
    assert accuracy(leave_one_out(_cases(11, noise=0.1))).coverage is not None
