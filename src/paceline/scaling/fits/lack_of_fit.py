"""Tests whether a surface describes its runs to within their noise.

If it does, the residuals are noise, and no smooth function of log N and log D explains more of them
than chance would. Known departures leave known patterns: the penalty of a learning rate tuned at
one size grows with the square of log N; an optimum that drifts with compute couples log N and
log D; a warm-up of fixed length costs in proportion to 1/D. Each of these, and low powers of both
logarithms as a catch-all, is subjected to an F test after projecting out the surface's own
coefficients. The p-values are multiplied by the number of tests (Bonferroni).
"""

import dataclasses

import numpy as np

from paceline.scaling.fits.parametric import SurfaceFit
from paceline.scaling.runs.sweep import Sweep
from paceline.scaling.surface import Array

_CERTAIN = 0.02
_SMALLEST_PATTERN = 1e-4
_POWERS = ((1, 1), (2, 0), (0, 2), (3, 0), (0, 3))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LackOfFit:
    """The most significant pattern in the residuals."""

    chance: float
    """Probability of a pattern at least as strong if the surface were right."""
    size: float
    """Root mean square of the pattern, as a share of the loss."""
    resembles: str
    """A cause that leaves a pattern like this, in words."""

    @property
    def is_certain(self) -> bool:
        """Whether the pattern is significant and large enough to change an answer."""
        return self.chance <= _CERTAIN and self.size >= _SMALLEST_PATTERN


def find_lack_of_fit(sweep: Sweep, fit: SurfaceFit) -> LackOfFit | None:
    """Tests the residuals for patterns; returns None if there are too few runs."""
    centre = np.exp(np.log(sweep.parameters).mean()), np.exp(np.log(sweep.tokens).mean())
    slopes = fit.surface.log_slopes(sweep.parameters, sweep.tokens, centre)
    tangent, _ = np.linalg.qr(slopes / np.linalg.norm(slopes, axis=0))
    residual = fit.residuals - tangent @ (tangent.T @ fit.residuals)
    patterns = _patterns(sweep)
    found = []
    for resembles, columns in patterns.items():
        free = columns - tangent @ (tangent.T @ columns)
        tested = _test(residual, free, len(sweep) - tangent.shape[1])
        if tested is not None:
            chance, size = tested
            chance = min(1.0, chance * len(patterns))
            found.append(LackOfFit(chance=chance, size=size, resembles=resembles))
    if not found:
        return None
    strongest = min(found, key=lambda lack: lack.chance)
    named = min(found[:-1], key=lambda lack: lack.chance, default=strongest)
    # A strong departure is significant in every pattern, and most in the most flexible one.
    resembles = named.resembles if named.chance < _CERTAIN else strongest.resembles
    return dataclasses.replace(strongest, resembles=resembles)


def _patterns(sweep: Sweep) -> dict[str, Array]:
    u, v = (_standardised(np.log(column)) for column in (sweep.parameters, sweep.tokens))
    return {
        "a learning rate tuned at one size only": (u**2)[:, None],
        "an optimum that drifts with compute": (u * v)[:, None],
        "a warm-up of the same length for all runs": (sweep.tokens.min() / sweep.tokens)[:, None],
        "no known cause": np.stack([u**i * v**j for i, j in _POWERS], axis=1),
    }


def _test(residual: Array, patterns: Array, freedom: int) -> tuple[float, float] | None:
    """Returns the p-value of the patterns and the RMS of the residual that they explain."""
    from scipy.special import fdtrc

    basis, scales, _ = np.linalg.svd(patterns, full_matrices=False)
    # Drop directions that the surface itself can absorb.
    basis = basis[:, scales > 1e-6 * max(float(scales.max()), 1.0)]
    freedom -= basis.shape[1]
    if freedom < 1 or not basis.shape[1]:
        return None
    explained = float(((basis.T @ residual) ** 2).sum())
    rest = max(float((residual**2).sum()) - explained, 1e-300)
    ratio = (explained / basis.shape[1]) / (rest / freedom)
    chance = float(fdtrc(basis.shape[1], freedom, ratio))
    return chance, float(np.sqrt(explained / len(residual)))


def _standardised(values: Array) -> Array:
    return np.asarray((values - values.mean()) / max(float(values.std()), 1e-12))
