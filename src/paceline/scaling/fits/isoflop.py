"""IsoFLOP profiles: the size with the lowest loss at every budget, then a power law through them.

The lowest run is fast but coarse: its N is one of the sizes tried, so its error is up to half a
step of the sweep, and differs between budgets. A parabola in log N interpolates the minimum between
runs. A loss profile is steeper on one side, so runs far from the minimum bias the vertex; runs are
therefore weighted by their distance from the lowest one. A budget whose lowest run is the smallest
or the largest tried has no interior minimum and is skipped; `diagnose` reports it.
"""

import dataclasses

import numpy as np

from paceline.core.errors import UsageError
from paceline.scaling.fits.bootstrap import MethodName, require_replicates
from paceline.scaling.fits.power_law import (
    LogLine,
    SaturatingLaw,
    draw_log_lines,
    fit_log_line,
    fit_saturating_law,
)
from paceline.scaling.runs.sweep import Sweep
from paceline.scaling.surface import Array

# Runs with a fifth or five times the size of the lowest one have a weight of 0.6.
_REACH = float(np.log(5.0))
_FEWEST_SIZES = 3


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """The runs of one budget and their minimum."""

    compute: float
    members: "np.ndarray[tuple[int], np.dtype[np.intp]]"
    """Indices of the budget's runs in the sweep, from small to large models."""
    lowest: int
    """Index in the sweep of the run with the lowest loss."""
    edge: str | None
    """"smallest" or "largest" if the lowest run is the smallest or largest model, else None."""
    coefficients: Array | None
    """Coefficients of the parabola in log N about the lowest run, constant first, if any."""
    vertex: float | None
    """N at the minimum of the parabola."""
    vertex_loss: float | None
    """Loss at that N."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PowerLawFit:
    """A power law for N and a saturating law for the loss, with their replicates."""

    method: MethodName
    compute: Array
    """Budgets of the fitted points."""
    parameters: Array
    loss: Array
    line: LogLine
    law: SaturatingLaw
    drawn_lines: LogLine
    drawn_laws: SaturatingLaw

    @property
    def exponent(self) -> float:
        """Exponent of C in the best N."""
        return float(self.line.slope[0])

    def optimum(self, compute: Array) -> tuple[Array, Array]:
        """Returns the best N and its loss for each budget."""
        return self.line.at(compute)[0], self.law.at(compute)[0]

    def draws(self, compute: Array) -> tuple[Array, Array]:
        """Returns the best N and its loss for each budget, with one row per replicate."""
        return self.drawn_lines.at(compute), self.drawn_laws.at(compute)


def find_profiles(sweep: Sweep) -> list[Profile]:
    """Returns the profile of every budget that has at least three sizes."""
    index = sweep.budget_index
    profiles = []
    for group, compute in enumerate(sweep.budgets):
        members = np.flatnonzero(index == group)
        members = members[np.argsort(sweep.parameters[members], kind="stable")]
        sizes, losses = sweep.parameters[members], sweep.loss[members]
        if len(np.unique(sizes)) < _FEWEST_SIZES:
            continue
        lowest = int(losses.argmin())
        edge = {sizes[0]: "smallest", sizes[-1]: "largest"}.get(sizes[lowest])
        coefficients = vertex = None
        if edge is None:
            offset = np.log(sizes / sizes[lowest])
            coefficients = _coefficients(offset, losses, np.ones((1, len(members))))[0]
            vertex = _vertex(coefficients, float(sizes[lowest]))
        best, best_loss = vertex or (None, None)
        profiles.append(
            Profile(
                compute=float(compute),
                members=members,
                lowest=int(members[lowest]),
                edge=edge,
                coefficients=None if vertex is None else coefficients,
                vertex=best,
                vertex_loss=best_loss,
            )
        )
    return profiles


def fit_lowest_run(sweep: Sweep, num_draws: int, seed: int = 0) -> PowerLawFit:
    """Fits power laws through the lowest run of every budget, as courses recommend."""
    profiles = find_profiles(sweep)
    require_points("lowest_run", len(profiles))
    compute = np.array([profile.compute for profile in profiles])
    lowest = [profile.lowest for profile in profiles]
    return power_law_through(
        "lowest_run", compute, sweep.parameters[lowest], sweep.loss[lowest], num_draws, seed
    )


def fit_parabola(sweep: Sweep, counts: Array) -> PowerLawFit:
    """Fits power laws through the vertex of each budget's parabola, once per row of counts."""
    profiles = [profile for profile in find_profiles(sweep) if profile.vertex is not None]
    require_points("parabola", len(profiles))
    compute = np.array([profile.compute for profile in profiles])
    vertices = np.array([profile.vertex for profile in profiles], dtype=np.float64)
    losses = np.array([profile.vertex_loss for profile in profiles], dtype=np.float64)
    drawn = [_drawn_vertices(sweep, profile, counts) for profile in profiles]
    drawn_vertices, drawn_losses = (
        np.stack(columns, axis=1) for columns in zip(*drawn, strict=True)
    )
    drawn_lines = fit_log_line(compute, drawn_vertices)
    drawn_laws = fit_saturating_law(compute, drawn_losses)
    has_answer = np.isfinite(drawn_lines.slope) & np.isfinite(drawn_laws.floor)
    require_replicates("parabola", float(has_answer.mean()))
    return PowerLawFit(
        method="parabola",
        compute=compute,
        parameters=vertices,
        loss=losses,
        line=fit_log_line(compute, vertices[None]),
        law=fit_saturating_law(compute, losses[None]),
        drawn_lines=drawn_lines,
        drawn_laws=drawn_laws,
    )


def power_law_through(
    method: MethodName,
    compute: Array,
    parameters: Array,
    loss: Array,
    num_draws: int,
    seed: int = 0,
) -> PowerLawFit:
    """Fits both laws through given points; replicates resample the scatter about the laws."""
    law = fit_saturating_law(compute, loss[None])
    fitted = law.at(compute)[0]
    generator = np.random.default_rng(seed)
    # Correct the residuals of least squares for the degrees of freedom.
    residual = (loss - fitted) * np.sqrt(len(loss) / max(len(loss) - 3, 1))
    drawn = fitted + generator.choice(residual, size=(num_draws, len(loss)))
    return PowerLawFit(
        method=method,
        compute=compute,
        parameters=parameters,
        loss=loss,
        line=fit_log_line(compute, parameters[None]),
        law=law,
        drawn_lines=draw_log_lines(compute, parameters, num_draws, seed),
        drawn_laws=fit_saturating_law(compute, drawn),
    )


def require_points(method: str, num_points: int) -> None:
    """Raises an error if there are fewer than three points for a power law."""
    if num_points < _FEWEST_SIZES:
        raise UsageError(
            f"{method}: {num_points} budgets have a minimum, a power law needs {_FEWEST_SIZES}; "
            "add budgets, or sizes below and above the lowest run"
        )


def parabola_vertex(parameters: Array, loss: Array, centre: float) -> tuple[float, float] | None:
    """Returns N and loss at the vertex of the weighted parabola, if it opens upwards."""
    coefficients = _coefficients(np.log(parameters / centre), loss, np.ones((1, len(loss))))
    return _vertex(coefficients[0], centre)


def _vertex(coefficients: Array, centre: float) -> tuple[float, float] | None:
    constant, slope, curvature = (float(value) for value in coefficients)
    if not curvature > 0:
        return None
    offset = -slope / (2 * curvature)
    return centre * float(np.exp(offset)), constant + slope * offset / 2


def _drawn_vertices(sweep: Sweep, profile: Profile, counts: Array) -> tuple[Array, Array]:
    sizes, losses = sweep.parameters[profile.members], sweep.loss[profile.members]
    centre = sweep.parameters[profile.lowest]
    offset = np.log(sizes / centre)
    drawn = _coefficients(offset, losses, counts[:, profile.members])
    with np.errstate(invalid="ignore", divide="ignore"):
        vertex = -drawn[:, 1] / (2 * drawn[:, 2])
    # Discard a replicate whose minimum lies outside the range of sizes.
    is_inside = (drawn[:, 2] > 0) & (vertex >= offset[0]) & (vertex <= offset[-1])
    return (
        np.where(is_inside, centre * np.exp(np.where(is_inside, vertex, 0.0)), np.nan),
        np.where(is_inside, drawn[:, 0] + drawn[:, 1] * vertex / 2, np.nan),
    )


def _coefficients(offset: Array, losses: Array, counts: Array) -> Array:
    """Fits one parabola per replicate; returns NaN if there are too few distinct sizes."""
    weights = counts * np.exp(-0.5 * (offset / _REACH) ** 2)
    powers = np.stack([np.ones_like(offset), offset, offset**2])
    gram = np.einsum("rn,in,jn->rij", weights, powers, powers, optimize=True)
    moments = np.einsum("rn,in->ri", weights * losses, powers)
    is_determined = np.linalg.cond(gram) < 1e10
    safe = np.where(is_determined[:, None, None], gram, np.eye(3))
    solved = np.linalg.solve(safe, moments[..., None])[..., 0]
    return np.asarray(np.where(is_determined[:, None], solved, np.nan))
