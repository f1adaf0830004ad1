"""Tests that the chosen method is the one that best predicts held-out budgets."""

import os

import numpy as np
import pytest

from paceline.reports.tables.scaling import methods_table
from paceline.scaling import Sweep, decide, diagnose, fit, predict, read_sweep, synthetic_sweep
from paceline.scaling.fits.all_methods import choose_method
from paceline.scaling.fits.isoflop import find_profiles, fit_parabola
from paceline.scaling.surface import EPOCH
from paceline.scaling.sweep import draw_counts, trim_far_runs
from paceline.scaling.synthetic import Departure, SweepDesign

DRIFTING = Departure(drift=0.1)


@pytest.fixture(scope="module")
def tuned() -> Sweep:
    path = os.environ.get("PACELINE_PORIAN_DATA")
    if not path:
        pytest.skip("PACELINE_PORIAN_DATA does not name the runs of Porian et al.")
    return read_sweep(path, name="4")


def test_the_loss_of_a_real_sweep_at_8_times_the_fitted_budgets(tuned: Sweep) -> None:
    index, profiles = tuned.budget_index, find_profiles(trim_far_runs(tuned))
    errors, held = [], []
    for first in range(6):
        shown = tuned.of_runs((index >= first) & (index < first + 4))
        choice = choose_method(shown)
        assert (choice.method, choice.is_trimmed) == ("parabola", True)
        near = trim_far_runs(shown)
        target = profiles[first + 6]
        loss = predict(
            fit_parabola(near, draw_counts(near, 200)), np.array([target.compute])
        ).loss.at(0)
        assert target.vertex_loss is not None
        errors.append(abs(loss.value / target.vertex_loss - 1))
        held.append(loss.low <= target.vertex_loss <= loss.high)  # type: ignore[operator]
    assert np.mean(errors) < 0.006
    assert np.mean(held) >= 0.8


def test_the_surface_answers_where_runs_lie_on_one(course_sweep: Sweep) -> None:
    for sweep in (course_sweep, synthetic_sweep(EPOCH, noise=0.003, seed=3)):
        choice = choose_method(sweep)
        assert (choice.method, choice.is_trimmed) == ("parametric", False)
        assert len(choice.held_out) == 3
        assert choice.reason.startswith("parametric is used: fitted to all runs without 6e+20")
        assert choice.error is not None
        assert choice.error < 0.005


def test_another_method_answers_where_they_do_not() -> None:
    sweep = synthetic_sweep(EPOCH, noise=0.002, departure=DRIFTING)
    found = fit(sweep, num_draws=30)
    assert found.chosen.method == found.choice.method == "parabola"
    assert len(found.sweep) < len(found.runs) == len(sweep)
    findings = {finding.name: finding for finding in diagnose(found, [1e22])}
    assert "(its residuals have a pattern)" in findings["surface_did_not_hold"].message
    assert "misspecified_surface" in findings
    assert "runs_trimmed" in findings
    (decision,) = decide(found, [1e22])
    assert decision.method == "parabola"
    assert found.choice.reason in methods_table(found, [decision], 0.9).notes
    (own,) = [answer for answer in decision.answers if answer.method == "parabola"]
    assert decision.run.parameters == pytest.approx(own.parameters.value, rel=0.03)
    wasted = {waste.reason: waste.wasted for waste in decision.waste}
    assert 0 < wasted["2 times the best N"] < wasted["4 times the best N"] < 1


def test_too_few_budgets_hold_nothing_out() -> None:
    design = SweepDesign(budgets=(1e19, 1e20, 1e21))
    found = fit(synthetic_sweep(EPOCH, design, noise=0.002), num_draws=10)
    assert found.choice.method == "parametric"
    assert found.choice.held_out == ()
    assert "none can be held out" in found.choice.reason


def test_runs_far_above_the_best_are_trimmed_but_four_stay() -> None:
    losses = [3.0, 3.01, 3.1, 3.2, 3.5, 9.0, 2.0, 2.5, 2.6, 2.7, 2.8, 2.9]
    sweep = Sweep.from_arrays(
        parameters=np.arange(1, 13) * 1e7, compute=[1e18] * 6 + [1e19] * 6, loss=losses
    )
    assert trim_far_runs(sweep).loss.tolist() == [3.0, 3.01, 3.1, 3.2, 2.0, 2.5, 2.6, 2.7]
