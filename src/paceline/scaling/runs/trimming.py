"""Trims runs far above the best of their budget, which bias a fit without informing it.

A model much too large for its budget ends undertrained: in Porian et al. 2024 (arXiv 2406.19146)
such runs end at up to twice the loss of their budget's best, on a curve that neither a parabola in
log N nor a sum of two powers describes. A run more than 5% above the lowest loss of its budget is
left out, but the four lowest runs of a budget always stay: one more than a parabola's coefficients.
"""

import numpy as np

from paceline.scaling.runs.sweep import Sweep

MOST_ABOVE_BEST = 0.05
FEWEST_KEPT = 4


def trim_far_runs(sweep: Sweep) -> Sweep:
    """Returns the runs near the best of their budget."""
    index = sweep.budget_index
    lowest = np.full(index.max() + 1, np.inf)
    np.minimum.at(lowest, index, sweep.loss)
    is_kept = sweep.loss <= (1 + MOST_ABOVE_BEST) * lowest[index]
    for budget in range(len(lowest)):
        members = np.flatnonzero(index == budget)
        is_kept[members[np.argsort(sweep.loss[members], kind="stable")[:FEWEST_KEPT]]] = True
    return sweep.of_runs(is_kept)
