"""Fits all methods to one sweep, and chooses the one that best predicts held-out budgets.

A method that does not apply to a sweep (no curves, too few budgets with a minimum) is skipped and
the reason recorded; it is an error only if no method applies.

The largest third of the budgets is held out (at least one, and at least three remain). Every method
is fitted to the smaller budgets, once with all runs and once with those near the best of their
budget. Its error is the mean over held-out budgets of |log(predicted / observed least loss)|; the
observed one is the vertex of that budget's own parabola, or its lowest run if there is no vertex.

Methods whose errors differ by less than the run-to-run noise (0.3%) are indistinguishable. Ties are
broken in this order: the surface, which uses every run; the parabola; the lowest run. A surface
whose residuals have a pattern is skipped: it may predict one budget by luck, but a surface that
does not describe its own runs is not expected to extrapolate.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from paceline.core.errors import UsageError
from paceline.scaling.fits.isoflop import (
    Profile,
    find_profiles,
    fit_envelope,
    fit_lowest_run,
    fit_parabola,
)
from paceline.scaling.fits.parametric import SurfaceFit, find_lack_of_fit, fit_huber, fit_parametric
from paceline.scaling.fits.prediction import MethodFit
from paceline.scaling.surface import Array
from paceline.scaling.sweep import DEFAULT_DRAWS, MethodName, Sweep, draw_counts, trim_far_runs

_HELD_OUT_ONE_IN = 3
"""One in this many budgets is held out."""
_FEWEST_FITTED = 3
RUNS_REPEAT_TO = 0.003

_METHODS: dict[MethodName, Callable[[Sweep], MethodFit]] = {
    "parametric": lambda sweep: fit_parametric(sweep, np.ones((1, len(sweep)))),
    "parabola": lambda sweep: fit_parabola(sweep, np.ones((1, len(sweep)))),
    "lowest_run": lambda sweep: fit_lowest_run(sweep, num_draws=1),
}
"""The methods that are scored, in the order of preference for ties."""

_TRIMMED: dict[MethodName, tuple[bool, ...]] = {
    # A surface should describe every run, a parabola only those near the minimum.
    "parametric": (False, True),
    "parabola": (True, False),
    # Trimming never removes the lowest run of a budget.
    "lowest_run": (False,),
}
"""Whether to trim to the runs near the best of their budget, in the order of preference."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutScore:
    """Error of one method on the held-out budgets."""

    method: MethodName
    is_trimmed: bool
    """Whether it was fitted to the runs near the best of their budget only."""
    error: float
    """Mean of |log(predicted / observed least loss)| over the held-out budgets."""
    has_pattern: bool = False
    """Whether the surface leaves a pattern in the residuals of all runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodChoice:
    """The method whose answer is reported, and the reason."""

    method: MethodName
    is_trimmed: bool
    """Whether all methods are fitted only to the runs near the best of their budget."""
    held_out: tuple[float, ...]
    """The held-out budgets in FLOPs; empty if there are too few budgets to hold any out."""
    scores: tuple[HeldOutScore, ...]
    """All scores, in ascending order of error."""

    @property
    def error(self) -> float | None:
        """The chosen method's error at the held-out budgets."""
        chosen = (self.method, self.is_trimmed)
        errors = {(score.method, score.is_trimmed): score.error for score in self.scores}
        return errors.get(chosen)

    @property
    def reason(self) -> str:
        """The reason for this choice, as a sentence with errors."""
        if self.error is None:
            return (
                f"{self.method} is used without validation: fewer than {_FEWEST_FITTED + 1} "
                "budgets have three sizes, so none can be held out"
            )
        budgets = ", ".join(f"{budget:.3g}" for budget in self.held_out)
        others = []
        # Scores are in ascending order of error, so the first score of a method is its best.
        for name in dict.fromkeys(score.method for score in self.scores):
            if name != self.method:
                score = next(score for score in self.scores if score.method == name)
                pattern = " (its residuals have a pattern)" if score.has_pattern else ""
                others.append(f"{name} to {score.error:.2%}{pattern}")
        runs = "runs near the best of each budget" if self.is_trimmed else "all runs"
        return ", ".join(
            [
                f"{self.method} is used: fitted to {runs} without {budgets} FLOPs, it predicts "
                f"the lowest loss there to {self.error:.2%}",
                *others,
            ]
        )


def choose_method(sweep: Sweep) -> MethodChoice:
    """Holds out the largest budgets and chooses the method that predicts them."""
    unjudged = MethodChoice(method="parametric", is_trimmed=False, held_out=(), scores=())
    parts = _hold_out(sweep)
    if parts is None:
        return unjudged
    smaller, larger = parts
    budgets, least = _minima(trim_far_runs(larger))
    scores = []
    for method, fit_method in _METHODS.items():
        for is_trimmed in _TRIMMED[method]:
            fitted, whole = (
                trim_far_runs(part) if is_trimmed else part for part in (smaller, sweep)
            )
            try:
                predicted = fit_method(fitted).optimum(budgets)[1]
                found = fit_method(whole)
            except UsageError:
                # The method does not apply to the smaller budgets or to the whole sweep.
                continue
            lack = find_lack_of_fit(whole, found) if isinstance(found, SurfaceFit) else None
            scores.append(
                HeldOutScore(
                    method=method,
                    is_trimmed=is_trimmed,
                    error=float(np.abs(np.log(predicted / least)).mean()),
                    has_pattern=lack is not None and lack.is_certain,
                )
            )
    if not scores:
        return unjudged
    chosen = _first_to_believe(scores)
    return MethodChoice(
        method=chosen.method,
        is_trimmed=chosen.is_trimmed,
        held_out=tuple(budgets.tolist()),
        scores=tuple(sorted(scores, key=lambda score: score.error)),
    )


def _hold_out(sweep: Sweep) -> tuple[Sweep, Sweep] | None:
    """Splits off the runs of the largest budgets; returns None if too few budgets would remain."""
    profiles = find_profiles(sweep)
    num_held_out = min(max(1, len(profiles) // _HELD_OUT_ONE_IN), len(profiles) - _FEWEST_FITTED)
    if num_held_out < 1:
        return None
    index = sweep.budget_index
    is_held_out = index >= index[profiles[-num_held_out].lowest]
    return sweep.of_runs(~is_held_out), sweep.of_runs(is_held_out)


def _minima(sweep: Sweep) -> tuple[Array, Array]:
    """Returns the budgets of a sweep and the lowest loss at each."""
    profiles = find_profiles(sweep)
    least = [profile.vertex_loss or sweep.loss[profile.lowest] for profile in profiles]
    return np.array([profile.compute for profile in profiles]), np.array(least)


def _first_to_believe(scores: list[HeldOutScore]) -> HeldOutScore:
    """Returns the first score, in the order of preference, that is within noise of the best."""
    sound = [score for score in scores if not score.has_pattern] or scores
    least = min(score.error for score in sound)
    return next(score for score in sound if score.error <= least + RUNS_REPEAT_TO)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ScalingFit:
    """A sweep and the fit of each method."""

    runs: Sweep
    """All runs."""
    sweep: Sweep
    """The fitted runs: all runs, or only those near the best of their budget."""
    profiles: tuple[Profile, ...]
    """The runs of each budget, with their minimum."""
    methods: tuple[MethodFit, ...]
    """The fit of each applicable method."""
    left_out: tuple[tuple[MethodName, str], ...]
    """Methods that do not apply, with the reason."""
    choice: MethodChoice
    """The method whose answer is reported, and its validation on held-out budgets."""

    @property
    def chosen(self) -> MethodFit:
        """The fit of the method that best predicted held-out budgets."""
        return next(fit for fit in self.methods if fit.method == self.choice.method)

    @property
    def parametric(self) -> SurfaceFit:
        """The surface fitted by variable projection; raises an error if there is none."""
        for fit in self.methods:
            if isinstance(fit, SurfaceFit) and fit.method == "parametric":
                return fit
        reason = dict(self.left_out)["parametric"]
        raise UsageError(f"the parametric method is needed: {reason}")

    @property
    def has_surface(self) -> bool:
        """Whether the parametric method found a surface."""
        return any(fit.method == "parametric" for fit in self.methods)


def fit(runs: Sweep, *, num_draws: int = DEFAULT_DRAWS, seed: int = 0) -> ScalingFit:
    """Fits every applicable method to a sweep, and chooses one by held-out budgets.

    Args:
        runs: The runs.
        num_draws: Number of replicates per method, from which intervals are computed.
        seed: Seed of the draws; the same seed gives the same intervals.
    """
    choice = choose_method(runs)
    sweep = trim_far_runs(runs) if choice.is_trimmed else runs
    counts = draw_counts(sweep, num_draws, seed)
    attempts: dict[MethodName, Callable[[], MethodFit]] = {
        "lowest_run": lambda: fit_lowest_run(sweep, num_draws, seed),
        "parabola": lambda: fit_parabola(sweep, counts),
        "envelope": lambda: fit_envelope(sweep, num_draws, seed),
        "huber": lambda: fit_huber(sweep, counts),
        "parametric": lambda: fit_parametric(sweep, counts),
    }
    methods, left_out = [], []
    for name, attempt in attempts.items():
        try:
            methods.append(attempt())
        except UsageError as error:
            left_out.append((name, str(error)))
    if not methods:
        reasons = "; ".join(reason for _name, reason in left_out)
        raise UsageError(f"no method can be fitted to these runs: {reasons}")
    if choice.method not in {method.method for method in methods}:
        choice = dataclasses.replace(choice, method=methods[-1].method)
    return ScalingFit(
        runs=runs,
        sweep=sweep,
        profiles=tuple(find_profiles(sweep)),
        methods=tuple(methods),
        left_out=tuple(left_out),
        choice=choice,
    )
