"""Which run to measure next: the one whose time most reduces the variance of what is asked.

With the constants' covariance C, a candidate with slopes j of its log seconds and measurement noise
s, and asked predictions with slopes J, measuring the candidate reduces the asked variances by
(J C j)^2 / (j C j + s^2), whatever its time turns out to be. The best candidate is taken, C is
updated, and so on. Nothing is measured here.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.planner.calibrations.prior import NOISE_OF_FEW

Matrix = npt.NDArray[np.float64]


def choose_runs(
    candidates: Matrix, covariance: Matrix, number: int, *, asked: Matrix | None = None
) -> list[int]:
    """Returns the indices of the runs to measure, most useful first.

    Args:
        candidates: Slopes of each candidate's log seconds, a row each.
        covariance: Of the constants, before the measurements.
        number: How many runs to choose.
        asked: Slopes of the log seconds to be predicted; the candidates themselves by default.
    """
    asked = candidates if asked is None else asked
    left = covariance
    chosen: list[int] = []
    for _ in range(min(number, len(candidates))):
        gains = _gains(candidates, left, asked)
        gains[chosen] = -1.0
        best = int(np.argmax(gains))
        chosen.append(best)
        left = measured_covariance(candidates[[best]], left)
    return chosen


def measured_covariance(runs: Matrix, covariance: Matrix) -> Matrix:
    """Returns the covariance of the constants once these runs have been measured."""
    left = covariance
    for slopes in runs:
        along = left @ slopes
        left = left - np.outer(along, along) / (slopes @ along + NOISE_OF_FEW**2)
    return left


def deviations_of(asked: Sequence[Matrix] | Matrix, covariance: Matrix) -> Matrix:
    """Returns the standard deviations of predicted log seconds with these slopes."""
    slopes = np.asarray(asked)
    variances: Matrix = np.einsum("ij,jk,ik->i", slopes, covariance, slopes)
    return np.sqrt(variances)


def _gains(candidates: Matrix, covariance: Matrix, asked: Matrix) -> Matrix:
    """Returns by how much each candidate reduces the mean variance of what is asked."""
    along = covariance @ candidates.T
    variances = np.einsum("ij,ji->i", candidates, along) + NOISE_OF_FEW**2
    gains: Matrix = ((asked @ along) ** 2).mean(axis=0) / variances
    return gains
