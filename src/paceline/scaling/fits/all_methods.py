"""Fits all methods to one sweep.

A method that does not apply to a sweep (no curves, too few budgets with a minimum) is skipped and
the reason recorded; it is an error only if no method applies. Held-out budgets decide which
method's answer to report, and whether runs far above the best of their budget are trimmed first.
"""

import dataclasses
from collections.abc import Callable

from paceline.core.errors import UsageError
from paceline.scaling.fits.bootstrap import DEFAULT_DRAWS, MethodName, draw_counts
from paceline.scaling.fits.envelope import fit_envelope
from paceline.scaling.fits.held_out import MethodChoice, choose_method
from paceline.scaling.fits.huber import fit_huber
from paceline.scaling.fits.isoflop import Profile, find_profiles, fit_lowest_run, fit_parabola
from paceline.scaling.fits.parametric import SurfaceFit, fit_parametric
from paceline.scaling.fits.prediction import MethodFit
from paceline.scaling.runs.sweep import Sweep
from paceline.scaling.runs.trimming import trim_far_runs


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
