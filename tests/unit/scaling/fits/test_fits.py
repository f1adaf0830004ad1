"""Tests of every method: the courses' runs, noise-free surfaces, and direct searches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import UsageError
from paceline.scaling import LossSurface, Sweep, SweepDesign, fit, predict, synthetic_sweep
from paceline.scaling.fits.isoflop import (
    find_profiles,
    fit_envelope,
    fit_log_line,
    fit_lowest_run,
    fit_parabola,
    fit_saturating_law,
    power_law_through,
)
from paceline.scaling.fits.least_squares import fit_projection, solve_non_negative
from paceline.scaling.fits.parametric import fit_huber, fit_parametric, huber_objective, optima_of
from paceline.scaling.fits.prediction import MethodFit, predict_loss, profile_interval
from paceline.scaling.sweep import draw_counts

TARGETS = np.array([1e23, 1e24])


def coefficients(surface: LossSurface) -> list[float]:
    return [
        surface.irreducible,
        surface.parameter_scale,
        surface.parameter_exponent,
        surface.token_scale,
        surface.token_exponent,
    ]


@pytest.fixture(scope="module")
def course_methods(course_sweep: Sweep) -> dict[str, MethodFit]:
    return {method.method: method for method in fit(course_sweep, num_draws=200).methods}


@pytest.mark.parametrize("method", ["parametric", "huber"])
def test_the_courses_surface_is_recovered(
    course_methods: dict[str, MethodFit], method: str
) -> None:
    found = course_methods[method]
    truth = [2.69, 1606.4, 0.34, 3210.7, 0.36]
    np.testing.assert_allclose(coefficients(found.surface), truth, rtol=5e-5)  # type: ignore[attr-defined]
    answer = predict(found, TARGETS)
    np.testing.assert_allclose(answer.parameters.value, [9.19e10, 3.003e11], rtol=5e-4)
    np.testing.assert_allclose(answer.tokens.value, [1.814e11, 5.55e11], rtol=5e-4)


@pytest.mark.parametrize(
    ("method", "parameters", "tokens"),
    [
        ("lowest_run", [7.00e10, 2.06e11], [2.38e11, 8.09e11]),
        ("parabola", [9.11e10, 2.98e11], [1.83e11, 5.59e11]),
    ],
)
def test_the_courses_other_rows(
    course_methods: dict[str, MethodFit], method: str, parameters: list[float], tokens: list[float]
) -> None:
    answer = predict(course_methods[method], TARGETS)
    np.testing.assert_allclose(answer.parameters.value, parameters, rtol=0.01)
    np.testing.assert_allclose(answer.tokens.value, tokens, rtol=0.01)


def test_the_lowest_runs_interval_is_the_textbooks(course_sweep: Sweep) -> None:
    found = fit_lowest_run(course_sweep, num_draws=20_000)
    answer = predict(found, TARGETS, level=0.95)
    np.testing.assert_allclose(answer.parameters.low, [4.5e10, 1.2e11], rtol=0.04)
    np.testing.assert_allclose(answer.parameters.high, [1.08e11, 3.6e11], rtol=0.04)
    assert found.exponent == pytest.approx(0.4687, abs=1e-4)


@settings(max_examples=20, deadline=None)
@given(
    st.builds(
        LossSurface,
        irreducible=st.floats(0.5, 3.0),
        parameter_scale=st.floats(100, 3000),
        parameter_exponent=st.floats(0.2, 0.6),
        token_scale=st.floats(100, 3000),
        token_exponent=st.floats(0.2, 0.6),
    )
)
def test_noise_free_surfaces_are_recovered(surface: LossSurface) -> None:
    sweep = synthetic_sweep(surface)
    found = fit_parametric(sweep, draw_counts(sweep, 2)).surface
    np.testing.assert_allclose(coefficients(found), coefficients(surface), rtol=1e-4)


def test_replicates_are_fits_of_the_runs_that_they_drew(surface: LossSurface) -> None:
    sweep = synthetic_sweep(surface, noise=0.005)
    counts = draw_counts(sweep, 5)
    together = fit_projection(sweep.parameters, sweep.tokens, sweep.loss, counts)
    for row, count in enumerate(counts):
        drawn = np.repeat(np.arange(len(sweep)), count.astype(int))
        alone = fit_projection(sweep.parameters[drawn], sweep.tokens[drawn], sweep.loss[drawn])
        fitted = [found[[0, 2, 4]] for found in (together.coefficients[row], alone.coefficients[0])]
        np.testing.assert_allclose(*fitted, rtol=1e-5)


def test_the_projection_finds_what_a_general_optimiser_finds(surface: LossSurface) -> None:
    from scipy.optimize import least_squares

    sweep = synthetic_sweep(surface, noise=0.01, seed=4)
    found = fit_projection(sweep.parameters, sweep.tokens, sweep.loss)

    def residuals(theta: np.ndarray) -> np.ndarray:
        floor, scale_n, alpha, scale_d, beta = theta
        by_parameters = scale_n * (sweep.parameters / 1e9) ** -alpha
        by_tokens = scale_d * (sweep.tokens / 1e10) ** -beta
        return (floor + by_parameters + by_tokens) / sweep.loss - 1

    searched = least_squares(residuals, [1.8, 0.3, 0.35, 0.4, 0.37], xtol=1e-14, ftol=1e-14)
    assert found.squares[0] == pytest.approx(2 * searched.cost, rel=1e-8)
    np.testing.assert_allclose(found.coefficients[0, [2, 4]], searched.x[[2, 4]], rtol=1e-4)


def test_huber_is_deaf_to_a_few_bad_runs(surface: LossSurface) -> None:
    sweep = synthetic_sweep(surface, noise=0.002, seed=1)
    sweep.loss[[5, 30, 60]] *= 1.3
    counts = draw_counts(sweep, 2)
    robust, plain = fit_huber(sweep, counts), fit_parametric(sweep, counts)
    truth = surface.optimal_parameters(TARGETS)
    np.testing.assert_allclose(robust.optimum(TARGETS)[0], truth, rtol=0.15)
    assert huber_objective(sweep, robust.surface) < huber_objective(sweep, plain.surface)
    assert huber_objective(sweep, robust.surface) <= huber_objective(sweep, surface)


def test_hubers_knee_is_a_thousandth(surface: LossSurface) -> None:
    sweep = synthetic_sweep(surface)
    sweep.loss[0] *= np.exp(5e-4)
    assert huber_objective(sweep, surface) == pytest.approx(0.5 * 5e-4**2, rel=1e-6)
    sweep.loss[0] *= np.exp(0.2 - 5e-4)
    assert huber_objective(sweep, surface) == pytest.approx(1e-3 * (0.2 - 5e-4), rel=1e-6)


def test_hubers_fit_is_the_least_that_a_general_optimiser_finds(surface: LossSurface) -> None:
    from scipy.optimize import least_squares

    sweep = synthetic_sweep(surface, noise=0.004, seed=3)
    sweep.loss[[7, 40]] *= 1.2
    found = fit_huber(sweep, draw_counts(sweep, 2)).surface

    def residuals(theta: np.ndarray) -> np.ndarray:
        by_parameters = theta[1] - theta[2] * np.log(sweep.parameters / 1e9)
        by_tokens = theta[3] - theta[4] * np.log(sweep.tokens / 1e10)
        terms = [np.full(len(sweep), theta[0]), by_parameters, by_tokens]
        return np.log(sweep.loss) - np.logaddexp.reduce(terms, axis=0)

    start = [np.log(1.8), -1.0, 0.35, -1.0, 0.37]
    tight = {"xtol": 1e-14, "ftol": 1e-14, "gtol": 1e-14}
    searched = least_squares(residuals, start, loss="huber", f_scale=1e-3, **tight)
    assert huber_objective(sweep, found) == pytest.approx(searched.cost, rel=1e-4)
    assert found.allocation_exponent == pytest.approx(
        searched.x[4] / (searched.x[2] + searched.x[4]), rel=2e-3
    )


def test_the_parabola_weighs_runs_by_their_distance_from_the_lowest(surface: LossSurface) -> None:
    sweep = synthetic_sweep(surface, SweepDesign(reach=16.0, num_sizes=9), noise=0.002, seed=6)
    for profile in find_profiles(sweep):
        offset = np.log(sweep.parameters[profile.members] / sweep.parameters[profile.lowest])
        # At five times the lowest run's size, a run's weight is exp(-1/2); polyfit squares weights.
        weights = np.exp(-0.25 * (offset / np.log(5)) ** 2)
        fitted = np.polyfit(offset, sweep.loss[profile.members], 2, w=weights)
        vertex = sweep.parameters[profile.lowest] * np.exp(-fitted[1] / (2 * fitted[0]))
        assert profile.vertex == pytest.approx(vertex, rel=1e-6)


def test_draws_of_a_law_scatter_as_least_squares_says() -> None:
    generator = np.random.default_rng(0)
    compute = np.geomspace(1e18, 1e21, 8)
    loss = (2 + 100 * compute**-0.12) * np.exp(0.003 * generator.standard_normal(8))
    found = power_law_through("lowest_run", compute, 0.1 * compute**0.5, loss, 4000)
    residual = loss - found.optimum(compute)[1]
    # The total variance of a fit with three coefficients is three times the noise variance: the
    # sum of squared residuals over their degrees of freedom, 8 - 3.
    scatter = found.draws(compute)[1].var(axis=0).sum()
    assert scatter == pytest.approx(3 * (residual**2).sum() / (8 - 3), rel=0.2)


def test_draws_of_a_surface_are_widened_by_the_freedom_of_its_fit(surface: LossSurface) -> None:
    sweep = synthetic_sweep(
        surface, SweepDesign(budgets=(1e19, 1e20, 1e21), num_sizes=6), noise=0.002
    )
    found = fit_parametric(sweep, draw_counts(sweep, 400))
    plain = optima_of(found.replicates, TARGETS)
    for best, drawn, bare in zip(found.optimum(TARGETS), found.draws(TARGETS), plain, strict=True):
        np.testing.assert_allclose(
            np.log(drawn / best), np.sqrt(18 / 13) * np.log(bare / best), rtol=1e-9, atol=1e-12
        )


def test_the_profile_interval_agrees_with_the_bootstrap(surface: LossSurface) -> None:
    sweep = synthetic_sweep(surface, noise=0.004, seed=2)
    found = fit_parametric(sweep, draw_counts(sweep, 1000))
    profile = profile_interval(sweep, found, 1e24, 0.9)
    bootstrap = predict(found, np.array([1e24])).parameters.at(0)
    assert profile.low is not None
    assert profile.high is not None
    assert bootstrap.low is not None
    assert bootstrap.high is not None
    widths = [np.log(estimate.high / estimate.low) for estimate in (profile, bootstrap)]  # type: ignore[operator]
    assert widths[0] == pytest.approx(widths[1], rel=0.3)
    assert profile.low < profile.value < profile.high


def test_the_profile_ends_where_the_runs_object(surface: LossSurface) -> None:
    """Fixes N* at both ends, and fits the other four coefficients with a general optimiser."""
    from scipy.optimize import least_squares
    from scipy.stats import f

    sweep = synthetic_sweep(surface, noise=0.004, seed=2)
    found = fit_parametric(sweep, draw_counts(sweep, 100))
    profile = profile_interval(sweep, found, 1e24, 0.9)
    tight = {"xtol": 1e-14, "ftol": 1e-14, "gtol": 1e-14}

    def least_squares_at(best: float) -> float:
        def residuals(theta: np.ndarray) -> np.ndarray:
            floor, height, alpha, beta = theta
            x = (sweep.parameters / best) ** -alpha / alpha
            y = (sweep.tokens * 6 * best / 1e24) ** -beta / beta
            return (floor + height * (x + y)) / sweep.loss - 1

        return 2 * float(least_squares(residuals, [1.8, 0.02, 0.35, 0.37], **tight).cost)

    least = least_squares_at(profile.value)
    allowed = f.ppf(0.9, 1, len(sweep) - 5) / (len(sweep) - 5)
    for end in (profile.low, profile.high):
        assert end is not None
        assert least_squares_at(end) / least - 1 == pytest.approx(allowed, rel=0.02)


def test_a_wider_level_gives_a_wider_profile(surface: LossSurface) -> None:
    sweep = synthetic_sweep(surface, noise=0.004, seed=2)
    found = fit_parametric(sweep, draw_counts(sweep, 100))
    narrow, wide = (profile_interval(sweep, found, 1e24, level) for level in (0.5, 0.95))
    assert wide.low < narrow.low < narrow.high < wide.high  # type: ignore[operator]


def test_the_envelope_of_curves_finds_the_exponent(surface: LossSurface) -> None:
    design = SweepDesign(num_sizes=12)
    found = fit_envelope(synthetic_sweep(surface, design, with_curves=True), num_draws=200)
    assert found.exponent == pytest.approx(surface.allocation_exponent, abs=0.03)
    with pytest.raises(UsageError, match="no run has a curve"):
        fit_envelope(synthetic_sweep(surface), num_draws=200)


def test_a_minimum_at_the_edge_does_not_count(surface: LossSurface) -> None:
    design = SweepDesign(offset=0.15, budgets=(1e19, 1e20, 1e21))
    sweep = synthetic_sweep(surface, design)
    assert [profile.edge for profile in find_profiles(sweep)] == ["largest"] * 3
    with pytest.raises(UsageError, match="0 budgets have a minimum"):
        fit_parabola(sweep, draw_counts(sweep, 10))
    result = fit(sweep, num_draws=20)
    assert "parabola" in dict(result.left_out)
    assert result.has_surface


def test_n_and_d_always_spend_the_budget(surface: LossSurface) -> None:
    sweep = synthetic_sweep(surface, noise=0.003, with_curves=True)
    for method in fit(sweep, num_draws=50).methods:
        answer = predict(method, TARGETS)
        spent = 6 * answer.parameters.value * answer.tokens.value
        np.testing.assert_allclose(spent, TARGETS)
        np.testing.assert_allclose(6 * answer.parameters.low * answer.tokens.high, TARGETS)


def test_too_few_runs_allow_no_method() -> None:
    sweep = Sweep.from_arrays(parameters=[1e8, 2e8], compute=[1e18, 1e18], loss=[3.0, 3.1])
    with pytest.raises(UsageError, match=r"no method can be fitted.*2 distinct runs"):
        fit(sweep)


def test_losses_that_grow_with_size_and_data_have_no_surface(surface: LossSurface) -> None:
    sweep = synthetic_sweep(surface)
    upside_down = Sweep.from_arrays(
        parameters=sweep.parameters, compute=sweep.compute, loss=8 - sweep.loss
    )
    with pytest.raises(UsageError, match="no surface"):
        fit_parametric(upside_down, draw_counts(upside_down, 5))


def test_laws_recover_their_own_points() -> None:
    compute = np.geomspace(1e18, 1e21, 6)
    line = fit_log_line(compute, (3 * compute**0.4)[None])
    np.testing.assert_allclose(line.at(TARGETS)[0], 3 * TARGETS**0.4)
    law = fit_saturating_law(compute, (2 + 100 * compute**-0.12)[None])
    np.testing.assert_allclose(law.at(TARGETS)[0], 2 + 100 * TARGETS**-0.12, rtol=1e-3)
    with_hole = (3 * compute**0.4)[None].copy()
    with_hole[0, 2] = np.nan
    np.testing.assert_allclose(fit_log_line(compute, with_hole).at(TARGETS)[0], 3 * TARGETS**0.4)


def test_the_worked_example_of_what_goes_wrong(course_sweep: Sweep) -> None:
    """Repeats a write-up that fits the lowest runs in linear space and ends 3.5 times too low."""
    from scipy.optimize import curve_fit

    profiles = find_profiles(course_sweep)
    compute = np.array([profile.compute for profile in profiles])
    sizes = np.array([course_sweep.parameters[profile.lowest] for profile in profiles])
    tokens = compute / (6 * sizes)

    def law(c: np.ndarray, scale: float, exponent: float) -> np.ndarray:
        return scale * (c / 1e20) ** exponent

    plain, _ = curve_fit(law, compute, sizes, [2.5e9, 0.5])
    np.testing.assert_allclose(law(TARGETS, *plain), [5.0e10, 1.27e11], rtol=0.01)

    def shifted(c: np.ndarray, scale: float, exponent: float, shift: float) -> np.ndarray:
        return law(c, scale, exponent) + shift

    answers = []
    for values, start in ((sizes, [4e9, 0.33, -1e9]), (tokens, [5e9, 0.62, 6e8])):
        found, _ = curve_fit(shifted, compute, values, start, maxfev=20_000)
        answers.append(shifted(TARGETS, *found))
    np.testing.assert_allclose(answers[0], [3.98e10, 8.55e10], rtol=0.01)
    np.testing.assert_allclose(answers[1], [3.65e11, 1.53e12], rtol=0.01)
    # Fitted separately, N and D no longer spend the whole budget.
    assert 6 * answers[0][1] * answers[1][1] / 1e24 == pytest.approx(0.78, abs=0.01)


@given(st.integers(0, 10**6))
def test_coefficients_at_their_bounds_are_the_best_there(seed: int) -> None:
    from scipy.optimize import nnls

    generator = np.random.default_rng(seed)
    designs = generator.normal(size=(4, 12, 3))
    losses = generator.normal(size=(4, 12))
    gram = designs.transpose(0, 2, 1) @ designs
    moments = np.einsum("rni,rn->ri", designs, losses)
    found = solve_non_negative(gram, moments)
    for row, (design, loss) in enumerate(zip(designs, losses, strict=True)):
        expected, residual = nnls(design, loss)
        # The enumerated faces have E, or both A and B; other solutions are not surfaces.
        if expected[0] > 0 or (expected[1] > 0 and expected[2] > 0):
            assert np.linalg.norm(loss - design @ found[row]) == pytest.approx(residual, rel=1e-6)


@pytest.mark.slow
def test_one_more_run_ends_within_its_interval(surface: LossSurface) -> None:
    """Checks 90% coverage of runs with twice the compute, each predicted from another sweep."""
    design = SweepDesign(budgets=(1e18, 3e18, 1e19, 3e19), num_sizes=6)
    generator = np.random.default_rng(7)
    noise, num_sweeps, held = 0.01, 60, 0
    parameters = float(surface.optimal_parameters(6e19))
    tokens = 6e19 / (6 * parameters)
    for seed in range(num_sweeps):
        sweep = synthetic_sweep(surface, design, noise=noise, seed=seed)
        fitted = fit_parametric(sweep, draw_counts(sweep, 100, seed))
        found = predict_loss(fitted, parameters, tokens, seed=seed)
        loss = float(surface.loss(parameters, tokens)) * np.exp(noise * generator.standard_normal())
        assert found.low is not None
        assert found.high is not None
        held += found.low <= loss <= found.high
    assert 0.8 * num_sweeps <= held < num_sweeps
