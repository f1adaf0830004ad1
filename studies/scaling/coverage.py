"""Studies of the scaling-law methods on known surfaces: coverage, bias and warnings.

A 90% interval is correct if it contains the truth in nine of ten sweeps. A diagnosis is correct if
it warns when the runs violate the method's assumptions, and only then.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from paceline.scaling.diagnose import diagnose
from paceline.scaling.fits.all_methods import MethodChoice, ScalingFit
from paceline.scaling.fits.isoflop import fit_lowest_run, fit_parabola
from paceline.scaling.fits.parametric import fit_parametric
from paceline.scaling.fits.prediction import DEFAULT_LEVEL, MethodFit, predict
from paceline.scaling.surface import EPOCH, Array, LossSurface, tokens_for
from paceline.scaling.sweep import draw_counts
from paceline.scaling.synthetic import Departure, SweepDesign, synthetic_sweep, true_loss

_DIAGNOSIS_DRAWS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coverage:
    """Results of one method over many noisy sweeps, at 100 times their largest budget."""

    method: str
    covered: float
    """Share of the sweeps whose interval of N contains the truth."""
    covered_loss: float
    """Share of the sweeps whose interval of the loss contains the truth."""
    bias: float
    """Median ratio of the estimated to the true N, minus one."""
    deviation: float
    """Standard deviation of the log of the estimated N."""
    width: float
    """Median ratio of the interval's upper to its lower end."""


def coverage_study(
    *,
    num_sweeps: int,
    num_draws: int,
    noise: float,
    surface: LossSurface = EPOCH,
    design: SweepDesign | None = None,
    level: float = DEFAULT_LEVEL,
    on_progress: Callable[[int], None] = lambda _: None,
) -> list[Coverage]:
    """Fits noisy sweeps of a known surface and counts how often the truth is covered."""
    design = design or SweepDesign()
    target = np.array([100 * max(design.budgets)])
    truth = float(surface.optimal_parameters(target)[0])
    least_loss = float(surface.optimal_loss(target)[0])
    seen: dict[str, list[tuple[float, ...]]] = {}
    for seed in range(num_sweeps):
        sweep = synthetic_sweep(surface, design, noise=noise, seed=seed)
        counts = draw_counts(sweep, num_draws, seed)
        methods: tuple[MethodFit, ...] = (
            fit_parametric(sweep, counts),
            fit_parabola(sweep, counts),
            fit_lowest_run(sweep, num_draws, seed),
        )
        for method in methods:
            answer = predict(method, target, level)
            size, loss = answer.parameters, answer.loss
            seen.setdefault(method.method, []).append(
                (
                    float(size.low[0] <= truth <= size.high[0]),
                    float(loss.low[0] <= least_loss <= loss.high[0]),
                    float(size.value[0] / truth),
                    float(size.high[0] / size.low[0]),
                )
            )
        on_progress(seed + 1)
    return [_coverage(method, np.array(rows)) for method, rows in seen.items()]


def warning_study(
    *, num_sweeps: int, noise: float, departure: Departure, surface: LossSurface = EPOCH
) -> tuple[float, float]:
    """Returns how often the diagnosis reports a misspecified surface, and the bias of N.

    The bias is that of the parametric method at 100 times the largest budget, relative to the best
    model of runs with the right learning rate and warm-up.
    """
    target = 100 * max(SweepDesign().budgets)
    sizes = float(surface.optimal_parameters(target)) * np.geomspace(1e-2, 1e2, 20_001)
    proper = Departure(drift=departure.drift)
    truth = sizes[true_loss(surface, sizes, tokens_for(target, sizes), proper).argmin()]
    num_warned, ratios = 0, []
    for seed in range(num_sweeps):
        sweep = synthetic_sweep(surface, noise=noise, departure=departure, seed=seed)
        fitted = fit_parametric(sweep, draw_counts(sweep, _DIAGNOSIS_DRAWS, seed))
        choice = MethodChoice(method="parametric", is_trimmed=False, held_out=(), scores=())
        found = ScalingFit(
            runs=sweep, sweep=sweep, profiles=(), methods=(fitted,), left_out=(), choice=choice
        )
        findings = diagnose(found, [1e22])
        num_warned += any(finding.name == "misspecified_surface" for finding in findings)
        ratios.append(float(fitted.surface.optimal_parameters(target)) / truth)
    return num_warned / num_sweeps, float(np.median(ratios)) - 1


def _coverage(method: str, rows: Array) -> Coverage:
    return Coverage(
        method=method,
        covered=float(rows[:, 0].mean()),
        covered_loss=float(rows[:, 1].mean()),
        bias=float(np.median(rows[:, 2])) - 1,
        deviation=float(np.log(rows[:, 2]).std()),
        width=float(np.median(rows[:, 3])),
    )
