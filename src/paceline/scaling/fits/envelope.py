"""The envelope of training curves: for every budget, the size with the lowest loss so far.

Each point of a curve is treated as the end of a run, which is valid only if the learning rate had
decayed by then; `diagnose` compares curves with final losses. At each of many budgets, a parabola
through the lowest curve and its neighbours in size interpolates the best N. A budget at which the
smallest or the largest model has the lowest loss has no minimum and is skipped.
"""

import numpy as np

from paceline.core.errors import UsageError
from paceline.scaling.fits.isoflop import (
    PowerLawFit,
    parabola_vertex,
    power_law_through,
    require_points,
)
from paceline.scaling.runs.sweep import Sweep
from paceline.scaling.surface import Array, compute_for

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
            vertex = parabola_vertex(sizes[near], column[near], float(sizes[reached[lowest]]))
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
