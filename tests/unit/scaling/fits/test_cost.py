"""Tests of the time and memory of parametric fits."""

import time

import numpy as np
import pytest

from paceline.scaling import LossSurface, SweepDesign, synthetic_sweep
from paceline.scaling.fits.parametric import fit_parametric
from paceline.scaling.sweep import draw_counts


@pytest.mark.slow
def test_speed(surface: LossSurface) -> None:
    """Checks generous bounds on CPU time; docs/scaling-laws.md has measured times."""
    sweep = synthetic_sweep(surface, noise=0.005)
    fit_parametric(sweep, np.ones((1, len(sweep))))
    began = time.process_time()
    fit_parametric(sweep, np.ones((1, len(sweep))))
    assert time.process_time() - began < 0.5
    began = time.process_time()
    fit_parametric(sweep, draw_counts(sweep, 1000))
    assert time.process_time() - began < 10


def test_ten_thousand_runs_in_linear_memory(surface: LossSurface) -> None:
    import tracemalloc

    def peak(num_budgets: int) -> int:
        budgets = tuple(np.geomspace(1e18, 1e21, num_budgets))
        sweep = synthetic_sweep(surface, SweepDesign(budgets=budgets, num_sizes=10), noise=0.005)
        counts = draw_counts(sweep, 20)
        tracemalloc.start()
        fit_parametric(sweep, counts)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    small, large = peak(100), peak(1000)
    assert large < 12 * small
    assert large < 300e6
