"""All methods on one sweep.

A method that a sweep does not allow (no curves, too few budgets with a minimum) is left out with
the reason; only a sweep that allows none is an error. Budgets that are held out say which method's
answer is the headline, and whether runs far above the best of their budget are left out first.
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
    """A sweep and what each method makes of it."""

    runs: Sweep
    """All runs."""
    sweep: Sweep
    """The runs that were fitted: all, or those near the best of their budget."""
    profiles: tuple[Profile, ...]
    """The runs of each budget, with their minimum."""
    methods: tuple[MethodFit, ...]
    """The fit of each method that the sweep allows."""
    left_out: tuple[tuple[MethodName, str], ...]
    """Methods that the sweep does not allow, with the reason."""
    choice: MethodChoice
    """The method whose answer is the headline, and the budgets that it was judged by."""

    @property
    def chosen(self) -> MethodFit:
        """The fit of the method that held at budgets which it was not shown."""
        return next(fit for fit in self.methods if fit.method == self.choice.method)

    @property
    def parametric(self) -> SurfaceFit:
        """The surface by variable projection; a sweep that has none is an error."""
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
    """Fits every method that a sweep allows, and chooses one by held-out budgets.

    Args:
        runs: The runs.
        num_draws: Replicates per method, of which intervals are made.
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
