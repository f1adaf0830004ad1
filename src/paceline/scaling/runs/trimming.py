"""Runs far above the best of their budget, which bend a law without telling where it goes.

A model much too large for its budget ends undertrained: in Porian et al. 2024 (arXiv 2406.19146)
such runs end at up to twice the loss of their budget's best, on a curve that no parabola in log N
and no sum of two powers follows. The rule: a run more than 5% above the lowest loss of its budget
is left out, except that the four lowest of a budget stay, one more than a parabola's coefficients.
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
