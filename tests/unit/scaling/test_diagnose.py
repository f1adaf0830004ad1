"""Tests that every pitfall is found where it was planted, and nowhere else."""

import dataclasses

import numpy as np
import pytest

from paceline.scaling import LossSurface, Sweep, SweepDesign, fit, synthetic_sweep
from paceline.scaling.claims import check_allocation, check_coefficients, rounding_range
from paceline.scaling.diagnose import diagnose, noise_free_bias
from paceline.scaling.fits.parametric import (
    find_lack_of_fit,
    fit_huber,
    fit_parametric,
    huber_objective,
)
from paceline.scaling.surface import EPOCH
from paceline.scaling.sweep import Curve, Remark
from paceline.scaling.synthetic import Departure
from tests.unit.scaling.surfaces import HOFFMANN

DRAWS = 60
NEAR = (1e22,)
FAR = (1e24,)


def names(sweep: Sweep, targets: tuple[float, ...] = NEAR) -> set[str]:
    return {finding.name for finding in diagnose(fit(sweep, num_draws=DRAWS), targets)}


@pytest.fixture(scope="module")
def clean(surface: LossSurface) -> Sweep:
    return synthetic_sweep(surface, SweepDesign(num_sizes=12, reach=3.0), noise=0.0005)


def test_a_good_sweep_has_no_findings(clean: Sweep) -> None:
    assert names(clean) <= {"coarse_sizes"}


def test_distance_and_the_share_of_the_floor(clean: Sweep) -> None:
    assert {"far_extrapolation", "irreducible_dominates"} <= names(clean, FAR)


def test_a_minimum_at_the_edge(surface: LossSurface) -> None:
    for offset, side in ((0.2, "larger"), (5.0, "smaller")):
        sweep = synthetic_sweep(surface, SweepDesign(offset=offset))
        found = [
            f for f in diagnose(fit(sweep, num_draws=DRAWS), NEAR) if f.name == "minimum_at_edge"
        ]
        assert len(found) == 9
        assert all(f"run {side} models" in finding.remedy for finding in found)


def test_too_few_budgets_and_sizes(surface: LossSurface) -> None:
    few = SweepDesign(budgets=(1e19, 3e19, 6e19), num_sizes=4)
    assert {"too_few_budgets", "too_few_sizes"} <= names(synthetic_sweep(surface, few))


@pytest.mark.parametrize(
    ("truth", "drift", "least", "most"), [(HOFFMANN, 0.0, 0.03, 0.06), (EPOCH, 0.2, -0.06, -0.03)]
)
def test_the_parabolas_bias_is_measured(
    truth: LossSurface, drift: float, least: float, most: float
) -> None:
    sweep = synthetic_sweep(truth, SweepDesign(reach=16.0, drift=drift, num_sizes=11))
    result = fit(sweep, num_draws=DRAWS)
    bias = noise_free_bias(result, "parabola", np.array(FAR))[0]
    assert least < bias < most
    # The runs have no noise, so the bias found on the fitted surface is the whole error.
    (own,) = [m.optimum(np.array(FAR))[0][0] for m in result.methods if m.method == "parabola"]
    assert bias == pytest.approx(own / float(truth.optimal_parameters(1e24)) - 1, abs=1e-4)
    assert "parabola_bias" in {finding.name for finding in diagnose(result, FAR)}


def test_compute_that_is_not_6nd(clean: Sweep) -> None:
    other = dataclasses.replace(clean, compute=clean.compute * 1.33)
    assert "inconsistent_compute" in names(other)
    embedding = 1 + 0.3 * (clean.parameters / clean.parameters.min()) ** -0.5
    grown = dataclasses.replace(clean, compute=clean.compute * embedding)
    assert "flops_counting" in names(grown)


def test_outlying_and_left_out_runs(clean: Sweep) -> None:
    loss = clean.loss.copy()
    loss[17] *= 1.1
    remark = Remark(name="no_loss", row=3, message="final_loss is nan; left out")
    sweep = dataclasses.replace(clean, loss=loss, remarks=(remark,))
    found = {f.name: f for f in diagnose(fit(sweep, num_draws=DRAWS), NEAR)}
    assert f"N {clean.parameters[17]:.3g}" in found["outlying_runs"].message
    assert "row 3" in found["runs_left_out"].message


@pytest.mark.parametrize(
    ("departure", "resembles"),
    [
        (Departure(drift=0.2), "drifts"),
        (Departure(untuned_learning_rate=0.005), "learning rate"),
        (Departure(fixed_warmup_tokens=1.5e8), "warm-up"),
    ],
    ids=["drift", "learning rate", "warm-up"],
)
def test_departures_from_the_surface(
    surface: LossSurface, departure: Departure, resembles: str
) -> None:
    sweep = synthetic_sweep(surface, noise=0.001, departure=departure, seed=3)
    findings = diagnose(fit(sweep, num_draws=DRAWS), NEAR)
    (found,) = [finding for finding in findings if finding.name == "misspecified_surface"]
    assert resembles in found.message


def test_the_test_of_fit_seldom_cries_wolf(surface: LossSurface) -> None:
    chances = []
    for seed in range(60):
        sweep = synthetic_sweep(surface, noise=0.005, seed=seed)
        lack = find_lack_of_fit(sweep, fit_parametric(sweep, np.ones((1, len(sweep)))))
        assert lack is not None
        chances.append(lack.chance)
    # If the surface is right, p-values are no smaller than uniform: at most a tenth below 0.1.
    assert np.median(chances) > 0.3
    assert np.mean(np.array(chances) < 0.1) < 0.2


def test_undetermined_sweeps_and_methods_that_disagree(surface: LossSurface) -> None:
    noisy = synthetic_sweep(
        surface, SweepDesign(budgets=(1e19, 2e19, 4e19, 8e19), num_sizes=5), noise=0.02
    )
    assert {"undetermined", "methods_disagree"} <= names(noisy, FAR)


def test_curves_that_had_not_decayed(surface: LossSurface) -> None:
    sweep = synthetic_sweep(surface, SweepDesign(num_sizes=10), with_curves=True)
    assert "unannealed_curves" not in names(sweep)
    raised = tuple(
        Curve(tokens=curve.tokens, loss=curve.loss * np.linspace(1.06, 1.0, len(curve.loss)))
        for curve in sweep.curves
        if curve is not None
    )
    assert "unannealed_curves" in names(dataclasses.replace(sweep, curves=raised))


def loose_fit(sweep: Sweep, start: LossSurface) -> tuple[LossSurface, int]:
    """Returns the published fit (mean Huber loss, L-BFGS-B, default tolerances) and its steps."""
    from scipy.optimize import minimize

    log_n, log_d, log_loss = (
        np.log(column) for column in (sweep.parameters, sweep.tokens, sweep.loss)
    )

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        terms = np.stack(
            [
                np.full_like(log_n, theta[0]),
                theta[1] - theta[2] * log_n,
                theta[3] - theta[4] * log_d,
            ]
        )
        predicted = np.logaddexp.reduce(terms, axis=0)
        share, residual = np.exp(terms - predicted), log_loss - predicted
        size = np.abs(residual)
        value = np.where(size < 1e-3, size**2 / 2, 1e-3 * (size - 5e-4)).mean()
        slopes = [share[0], share[1], -share[1] * log_n, share[2], -share[2] * log_d]
        return float(value), np.stack(slopes) @ -np.clip(residual, -1e-3, 1e-3) / len(sweep)

    e, a, alpha, b, beta = dataclasses.astuple(start)
    begin = [np.log(e), np.log(a), alpha, np.log(b), beta]
    found = minimize(objective, begin, jac=True, method="L-BFGS-B")
    assert found.success  # The optimiser reports success; that is the trap.
    logs = np.exp(found.x[[0, 1, 3]])
    surface = LossSurface(
        irreducible=float(logs[0]),
        parameter_scale=float(logs[1]),
        parameter_exponent=float(found.x[2]),
        token_scale=float(logs[2]),
        token_exponent=float(found.x[4]),
    )
    return surface, found.nit


def tokens_per_parameter(surface: LossSurface) -> float:
    return float(surface.optimal_tokens(5.76e23) / surface.optimal_parameters(5.76e23))


def test_the_failure_of_the_published_fit_is_reproduced_and_caught() -> None:
    budgets = tuple(np.geomspace(1e19, 3e21, 9))
    sweep = synthetic_sweep(EPOCH, SweepDesign(budgets=budgets, num_sizes=27), noise=0.003, seed=1)
    stopped, num_steps = loose_fit(sweep, HOFFMANN)
    assert num_steps <= 12
    assert tokens_per_parameter(stopped) > 40
    result = fit(sweep, num_draws=DRAWS)
    assert tokens_per_parameter(result.parametric.surface) == pytest.approx(
        tokens_per_parameter(EPOCH), rel=0.1
    )
    printed = [repr(value) for value in dataclasses.astuple(stopped)]
    found = {finding.name for finding in check_coefficients(result, printed, 5.76e23)}
    assert found == {"loose_optimiser"}
    truth = [repr(value) for value in dataclasses.astuple(EPOCH)]
    assert "loose_optimiser" not in {f.name for f in check_coefficients(result, truth, 5.76e23)}


def test_on_its_own_surface_the_published_fit_stops_at_once() -> None:
    budgets = tuple(np.geomspace(1e19, 3e21, 9))
    sweep = synthetic_sweep(
        HOFFMANN, SweepDesign(budgets=budgets, num_sizes=27), noise=0.003, seed=1
    )
    stopped, num_steps = loose_fit(sweep, HOFFMANN)
    assert num_steps <= 3
    best = fit_huber(sweep, np.ones((1, len(sweep)))).surface
    assert huber_objective(sweep, stopped) > 1.01 * huber_objective(sweep, best)


def test_rounding_of_printed_coefficients() -> None:
    low, high = rounding_range(["1.69", "406.4", "0.34", "410.7", "0.28"], 5.76e23)
    assert low < float(HOFFMANN.optimal_parameters(5.76e23)) < high
    assert high / low > 2
    low, high = rounding_range(["1.6930", "406.40", "0.339170", "410.72", "0.284910"], 5.76e23)
    assert high / low < 1.01


def test_a_wrong_answer_is_priced(course_sweep: Sweep) -> None:
    result = fit(course_sweep, num_draws=DRAWS)
    cost, findings = check_allocation(result, 1e24, 8.55e10, 1.53e12)
    assert cost.spent == pytest.approx(0.78, abs=0.01)
    assert {finding.name for finding in findings} == {"inconsistent_compute", "wrong_size"}
    assert 0.3 < cost.wasted < 0.6
    _, none = check_allocation(result, 1e24, 3.003e11, 5.55e11)
    assert none == []


def test_the_courses_runs(course_sweep: Sweep) -> None:
    found = names(course_sweep, (1e23, 1e24))
    assert found == {
        "coarse_sizes",
        "far_extrapolation",
        "irreducible_dominates",
        "methods_disagree",
    }
