"""IsoFLOP profiles: the size with the lowest loss at every budget, then a power law through them.

The lowest run is fast but coarse: its N is one of the sizes tried. A parabola in log N interpolates
the minimum between runs, weighted by their distance from the lowest one, because a loss profile is
steeper on one side. The envelope treats each point of a training curve as the end of a run, which
is valid only if the learning rate had decayed by then; `diagnose` checks that. A budget at which
the smallest or the largest model has the lowest loss has no minimum and is skipped.

Two laws go through the minima: N = k C^a, a line in log space, and L = E + K C^-g, linear in E and
K for a given g, so that only g is searched. Both fit many replicates at once, one per row; NaN
points of a replicate are ignored.
"""

import dataclasses

import numpy as np

from paceline.core.errors import UsageError
from paceline.scaling.surface import Array, compute_for
from paceline.scaling.sweep import MethodName, Sweep, require_replicates

_NUM_GRID = 60
_NUM_ZOOMS = 3
_FEWEST_POINTS = 3
_LARGEST_LOG = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LogLine:
    """Lines log N = level + slope (log C - centre), one per replicate."""

    centre: float
    level: Array
    slope: Array
    squares: Array
    """Sum of squared residuals in log N."""

    def at(self, compute: Array) -> Array:
        """Returns N of every replicate (rows) for every budget (columns)."""
        offset = np.log(compute) - self.centre
        logs = self.level[:, None] + self.slope[:, None] * offset
        # Three points leave a Student distribution without a mean, so draws can be arbitrarily far.
        return np.asarray(np.exp(np.clip(logs, -_LARGEST_LOG, _LARGEST_LOG)))


def fit_log_line(compute: Array, values: Array) -> LogLine:
    """Fits a line to every row of `values` in log space."""
    is_known = np.isfinite(values)
    log_values = np.log(np.where(is_known, values, 1.0))
    centre = float(np.log(compute).mean())
    offset = np.log(compute) - centre
    count = is_known.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_x = (is_known * offset).sum(axis=1) / count
        mean_y = (is_known * log_values).sum(axis=1) / count
        x, y = offset - mean_x[:, None], log_values - mean_y[:, None]
        # Fewer than two points give 0/0: the replicate becomes NaN and is dropped.
        slope = (is_known * x * y).sum(axis=1) / (is_known * x**2).sum(axis=1)
    residual = is_known * (y - slope[:, None] * x)
    return LogLine(
        centre=centre, level=mean_y - slope * mean_x, slope=slope, squares=(residual**2).sum(axis=1)
    )


def draw_log_lines(compute: Array, values: Array, num_draws: int, seed: int = 0) -> LogLine:
    """Draws lines from the Student distribution of a least-squares fit to one row of values.

    The percentiles of these draws are the textbook confidence intervals of the regression line.
    """
    line = fit_log_line(compute, values[None])
    offset = np.log(compute) - line.centre
    freedom = len(values) - 2
    generator = np.random.default_rng(seed)
    scale = np.sqrt(line.squares[0] / max(freedom, 1))
    # Level and slope are independent, because log C is centred.
    chi = np.sqrt(generator.chisquare(max(freedom, 1), num_draws) / max(freedom, 1))
    normal = generator.standard_normal((2, num_draws)) / chi
    return LogLine(
        centre=line.centre,
        level=line.level[0] + scale / np.sqrt(len(values)) * normal[0],
        slope=line.slope[0] + scale / np.sqrt((offset**2).sum()) * normal[1],
        squares=np.full(num_draws, line.squares[0]),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SaturatingLaw:
    """Laws L = floor + height (C/centre)^-exponent, one per replicate."""

    centre: float
    floor: Array
    height: Array
    exponent: Array

    def at(self, compute: Array) -> Array:
        """Returns the loss of every replicate (rows) for every budget (columns)."""
        power = (compute / self.centre) ** -self.exponent[:, None]
        return np.asarray(self.floor[:, None] + self.height[:, None] * power)

    def compute_for(self, loss: Array) -> Array:
        """Returns the compute at which the first law reaches each loss."""
        reducible = (loss - self.floor[0]) / self.height[0]
        return np.asarray(self.centre * reducible ** (-1 / self.exponent[0]))


def fit_saturating_law(compute: Array, losses: Array) -> SaturatingLaw:
    """Fits every row of `losses` by relative error, with a non-negative floor."""
    centre = float(np.exp(np.log(compute).mean()))
    ratio = np.log(compute / centre)
    is_known = np.isfinite(losses)
    # Two points do not determine the law: the result is NaN for replicates with fewer than three.
    is_determined = is_known.sum(axis=1) >= _FEWEST_POINTS
    is_known = is_known | ~is_determined[:, None]
    safe = np.where(is_known & is_determined[:, None], losses, 1.0)
    weights = is_known / safe**2
    low, high = np.full(len(losses), 0.005), np.full(len(losses), 1.5)
    for _ in range(_NUM_ZOOMS):
        steps = np.linspace(0, 1, _NUM_GRID)
        grid = low[:, None] * (high / low)[:, None] ** steps
        _floor, _height, squares = _solve_law(grid, ratio, weights, safe)
        best = squares.argmin(axis=1)
        rows = np.arange(len(losses))
        low = grid[rows, np.maximum(best - 1, 0)]
        high = grid[rows, np.minimum(best + 1, _NUM_GRID - 1)]
    exponent = grid[rows, best]
    floor, height, _squares = _solve_law(exponent[:, None], ratio, weights, safe)
    return SaturatingLaw(
        centre=centre,
        floor=np.where(is_determined, floor[:, 0], np.nan),
        height=height[:, 0],
        exponent=exponent,
    )


def _solve_law(
    exponents: Array, ratio: Array, weights: Array, losses: Array
) -> tuple[Array, Array, Array]:
    """Solves for floor and height at each exponent of a grid, per replicate."""
    power = np.exp(-exponents[:, :, None] * ratio)
    total = weights.sum(axis=1)[:, None]
    first = np.einsum("rgb,rb->rg", power, weights)
    second = np.einsum("rgb,rb->rg", power**2, weights)
    moment = (weights * losses).sum(axis=1)[:, None]
    moment_power = np.einsum("rgb,rb->rg", power, weights * losses)
    determinant = total * second - first**2
    with np.errstate(invalid="ignore", divide="ignore"):
        floor = (second * moment - first * moment_power) / determinant
        height = (total * moment_power - first * moment) / determinant
        through_zero = moment_power / second
    is_bound = ~(floor >= 0)
    floor, height = np.where(is_bound, 0.0, floor), np.where(is_bound, through_zero, height)
    residual = losses[:, None, :] - floor[..., None] - height[..., None] * power
    return floor, height, np.einsum("rgb,rb->rg", residual**2, weights)


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


# Neighbouring points of one curve belong to the same run: more budgets add no information.
_NUM_BUDGETS = 24


def fit_envelope(sweep: Sweep, num_draws: int, seed: int = 0) -> PowerLawFit:
    """Fits power laws through the minima of the envelope."""
    sizes, budgets, losses = curve_losses(sweep)
    points = []
    for budget, column in zip(budgets, losses.T, strict=True):
        reached = np.flatnonzero(np.isfinite(column))
        if len(reached) < 3:
            continue
        lowest = int(column[reached].argmin())
        if 0 < lowest < len(reached) - 1:
            near = reached[lowest - 1 : lowest + 2]
            centre = float(sizes[near[1]])
            offset = np.log(sizes[near] / centre)
            vertex = _vertex(_coefficients(offset, column[near], np.ones((1, 3)))[0], centre)
            if vertex is not None:
                points.append((budget, *vertex))
    require_points("envelope", len(points))
    compute, parameters, loss = np.array(points).T
    return power_law_through("envelope", compute, parameters, loss, num_draws, seed)


def curve_losses(sweep: Sweep) -> tuple[Array, Array, Array]:
    """Returns sizes, budgets, and the loss of each size at each budget; NaN if not reached."""
    curves = [
        (size, curve)
        for size, curve in zip(sweep.parameters, sweep.curves, strict=False)
        if curve is not None
    ]
    if not curves:
        raise UsageError(
            "envelope: no run has a curve; give runs a `curve` of [tokens, loss] pairs"
        )
    spans = np.array([compute_for(size, curve.tokens[[0, -1]]) for size, curve in curves])
    budgets = np.geomspace(spans[:, 0].min(), spans[:, 1].max(), _NUM_BUDGETS)
    sizes = np.unique([size for size, _ in curves])
    losses = np.full((len(sizes), _NUM_BUDGETS), np.inf)
    for size, curve in curves:
        row = int(np.searchsorted(sizes, size))
        compute = np.log(compute_for(size, curve.tokens))
        values = np.interp(np.log(budgets), compute, curve.loss, left=np.inf, right=np.inf)
        losses[row] = np.minimum(losses[row], values)
    return sizes, budgets, np.where(np.isfinite(losses), losses, np.nan)
