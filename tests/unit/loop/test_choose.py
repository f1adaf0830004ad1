"""Tests of the model that a fit chooses, its uncertainty, and the limit of uncertainty."""

import numpy as np
import pytest

from paceline.loop.choose import choose_model
from paceline.loop.directory import LoopStoppedError
from paceline.loop.sweep_design import Rule
from paceline.scaling import ScalingFit, Sweep, fit
from tests.unit.loop.fake_machine import SPEC
from tests.unit.loop.fake_runs import SURFACE


def _fit(noise: float, seed: int = 0) -> ScalingFit:
    compute = np.repeat(np.geomspace(7.5e11, 1.2e13, 5), 5)
    sizes = SURFACE.optimal_parameters(compute) * np.tile(np.geomspace(1 / 3, 3, 5), 5)
    chance = np.random.default_rng(seed)
    loss = SURFACE.loss(sizes, compute / (6 * sizes)) * np.exp(chance.normal(0, noise, 25))
    return fit(Sweep.from_arrays(parameters=sizes, compute=compute, loss=loss), num_draws=200)


def test_the_best_model_of_the_surface_is_chosen() -> None:
    model = choose_model(SPEC, _fit(0.001), Rule(learning_rate_factor=0.5), ())
    best = float(SURFACE.optimal_parameters(SPEC.budget))
    assert model.run.fitted_parameters == pytest.approx(best, rel=0.35)
    assert model.loss.value == pytest.approx(float(SURFACE.optimal_loss(SPEC.budget)), rel=0.01)
    assert model.run.learning_rate_factor == 0.5
    assert model.rule_of_thumb.loss > model.loss.value
    assert 0 < model.rule_of_thumb.wasted < 1


def test_runs_that_scatter_carry_no_decision() -> None:
    with pytest.raises(
        LoopStoppedError, match="too uncertain to choose a model; raise --exploration"
    ):
        choose_model(SPEC, _fit(0.08), Rule(), ())


def test_the_interval_is_that_of_one_run() -> None:
    quiet, noisy = (choose_model(SPEC, _fit(noise), Rule(), ()) for noise in (0.001, 0.01))
    assert noisy.noise == pytest.approx(0.01, rel=0.5)
    widths = []
    for model in (quiet, noisy):
        assert model.loss.low is not None
        assert model.loss.high is not None
        assert model.loss.low < float(SURFACE.optimal_loss(SPEC.budget)) < model.loss.high
        widths.append(model.loss.high / model.loss.low - 1)
    # Losses of single runs have a spread of 1%, so 90% lie within 1.6% on either side.
    assert widths[1] > 0.032 > widths[0]
