"""The parametric method: one surface fitted to all runs at once, by variable projection.

It uses every run, not only those near a minimum, and runs need not share budgets. Replicates are
fitted in one batch. Replicates whose exponents reach the allowed range are dropped and counted: if
there are many of them, the sweep does not determine the surface.
"""

import dataclasses

import numpy as np

from paceline.core.errors import UsageError
from paceline.scaling.fits.bootstrap import MethodName, require_replicates, widen
from paceline.scaling.fits.variable_projection import FittedSurfaces, fit_projection
from paceline.scaling.runs.sweep import Sweep
from paceline.scaling.surface import Array, LossSurface, optimal_parameters, tokens_for

NUM_COEFFICIENTS = 5


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SurfaceFit:
    """A surface, its replicates, and its residuals."""

    method: MethodName
    surface: LossSurface
    replicates: FittedSurfaces
    residuals: Array
    """Log of observed over fitted loss, for every run."""

    @property
    def exponent(self) -> float:
        """Exponent of C in the best N."""
        return self.surface.allocation_exponent

    @property
    def noise(self) -> float:
        """Standard deviation of the residuals: the noise of a run, as a share of its loss."""
        freedom = max(len(self.residuals) - NUM_COEFFICIENTS, 1)
        return float(np.sqrt((self.residuals**2).sum() / freedom))

    @property
    def failed_share(self) -> float:
        """Share of the replicates that failed to determine a surface."""
        return float(1 - self.replicates.is_converged.mean())

    def optimum(self, compute: Array) -> tuple[Array, Array]:
        """Returns the best N and its loss for each budget."""
        return self.surface.optimal_parameters(compute), self.surface.optimal_loss(compute)

    def draws(self, compute: Array) -> tuple[Array, Array]:
        """Returns the best N and its loss for each budget, with one row per replicate."""
        drawn = optima_of(self.replicates, compute)
        num_runs = len(self.residuals)
        parameters, loss = (
            widen(value, draws, num_runs, NUM_COEFFICIENTS)
            for value, draws in zip(self.optimum(compute), drawn, strict=True)
        )
        return parameters, loss

    def loss_draws(self, parameters: float, tokens: float) -> Array:
        """Returns the loss of a run of the given size, one value per converged replicate."""
        drawn = losses_of(self.replicates, parameters, tokens)[:, 0]
        value = self.surface.loss(parameters, tokens)
        return widen(value, drawn, len(self.residuals), NUM_COEFFICIENTS)


def fit_parametric(sweep: Sweep, counts: Array) -> SurfaceFit:
    """Fits the surface to a sweep, and once to each row of counts."""
    require_runs(sweep)
    point = fit_projection(sweep.parameters, sweep.tokens, sweep.loss)
    surface = surface_of(point, 0)
    replicates = fit_projection(sweep.parameters, sweep.tokens, sweep.loss, counts)
    require_replicates("parametric", float(replicates.is_converged.mean()))
    return SurfaceFit(
        method="parametric",
        surface=surface,
        replicates=replicates,
        residuals=residuals_of(surface, sweep),
    )


def require_runs(sweep: Sweep) -> None:
    """Raises an error if the sweep has too few distinct runs for five coefficients."""
    num_points = len(np.unique(np.stack([sweep.parameters, sweep.tokens]), axis=1).T)
    if num_points <= NUM_COEFFICIENTS:
        raise UsageError(
            f"{num_points} distinct runs cannot determine the {NUM_COEFFICIENTS} coefficients of a "
            "loss surface; add runs at other sizes and budgets"
        )


def surface_of(fit: FittedSurfaces, row: int) -> LossSurface:
    """Returns the surface of one row; raises an error if it has not converged."""
    if not fit.is_converged[row]:
        raise UsageError(
            "no surface E + A/N^alpha + B/D^beta describes these runs: the loss does not fall "
            "with N and D as it should; check the runs, or add sizes and budgets"
        )
    return LossSurface(*fit.coefficients[row].tolist())


def residuals_of(surface: LossSurface, sweep: Sweep) -> Array:
    """Returns the log of observed over predicted loss, for every run."""
    return np.asarray(np.log(sweep.loss / surface.loss(sweep.parameters, sweep.tokens)))


def optima_of(fit: FittedSurfaces, compute: Array) -> tuple[Array, Array]:
    """Returns the best N and its loss for every converged replicate."""
    _floor, scale_n, alpha, scale_d, beta = fit.coefficients[fit.is_converged].T[..., None]
    parameters = optimal_parameters(compute, scale_n, alpha, scale_d, beta)
    return parameters, losses_of(fit, parameters, tokens_for(compute, parameters))


def losses_of(fit: FittedSurfaces, parameters: Array | float, tokens: Array | float) -> Array:
    """Returns the loss at the given sizes, with one row per converged replicate."""
    floor, scale_n, alpha, scale_d, beta = fit.coefficients[fit.is_converged].T[..., None]
    return np.asarray(floor + scale_n * parameters**-alpha + scale_d * tokens**-beta)
