"""Backtests the scaling-law methods on a real sweep: the loss at 8 times the largest budget fitted.

    PACELINE_PORIAN_DATA=porian_runs.json python -m studies.scaling.porian \
        results/scaling-porian.jsonl

The runs are those of Porian et al. 2024 (arXiv 2406.19146): twelve budgets that double from 1.25e16
to 2.56e19 FLOPs, with the learning rate tuned at every size (sweep 4) and untuned (sweep 3).
Windows of four, six and eight neighbouring budgets are fitted to predict the least loss three
budgets further. One prediction uses the method that is chosen inside the window; the others use
each method. Appends one `scaling_backtest` record per prediction to the store.
"""

import os
import sys
from collections.abc import Iterator

import numpy as np

from paceline.core.errors import UsageError
from paceline.records import Metric
from paceline.scaling import Sweep, predict, read_sweep
from paceline.scaling.fits.all_methods import choose_method
from paceline.scaling.fits.isoflop import find_profiles, fit_lowest_run, fit_parabola
from paceline.scaling.fits.parametric import fit_parametric
from paceline.scaling.fits.prediction import MethodFit
from paceline.scaling.sweep import DEFAULT_DRAWS, draw_counts, trim_far_runs
from studies.harness.records import append_record
from studies.harness.study import study_parser

SWEEPS = {"tuned": "4", "untuned": "3"}
WINDOWS = (4, 6, 8)
_FURTHER = 3
"""Budgets from the last fitted one to the predicted one: a factor of 8."""


def windows(sweep: Sweep, num_budgets: int) -> Iterator[tuple[Sweep, float, float]]:
    """Yields the runs of neighbouring budgets, the budget to predict, and its least loss."""
    index = sweep.budget_index
    profiles = find_profiles(trim_far_runs(sweep))
    for first in range(len(profiles) - num_budgets - _FURTHER + 1):
        target = profiles[first + num_budgets - 1 + _FURTHER]
        least = target.vertex_loss or float(trim_far_runs(sweep).loss[target.lowest])
        is_shown = (index >= first) & (index < first + num_budgets)
        yield sweep.of_runs(is_shown), target.compute, least


def fit_one(method: str, sweep: Sweep, num_draws: int) -> MethodFit:
    """Fits one of the compared methods."""
    if method == "lowest_run":
        return fit_lowest_run(sweep, num_draws)
    fit_method = fit_parabola if method == "parabola" else fit_parametric
    return fit_method(sweep, draw_counts(sweep, num_draws))


def predictions(sweep: Sweep, num_draws: int) -> Iterator[tuple[str, str, MethodFit]]:
    """Yields the compared fits: a name, the method and runs as text, and the fit."""
    choice = choose_method(sweep)
    near = trim_far_runs(sweep)
    runs = near if choice.is_trimmed else sweep
    words = f"{choice.method}, {'near the best' if choice.is_trimmed else 'all runs'}"
    yield "chosen", words, fit_one(choice.method, runs, num_draws)
    for method in ("parametric", "parabola"):
        for name, some in ((method, sweep), (f"{method} near the best", near)):
            try:
                yield name, name, fit_one(method, some, num_draws)
            except UsageError as error:
                print(f"{name}: {error}")
    yield "lowest_run", "lowest_run", fit_one("lowest_run", sweep, num_draws)


def main() -> int:
    """Records every prediction."""
    parser = study_parser(__doc__)
    parser.add_argument("--draws", type=int, default=DEFAULT_DRAWS)
    arguments = parser.parse_args()
    for label, name in SWEEPS.items():
        sweep = read_sweep(os.environ["PACELINE_PORIAN_DATA"], name=name)
        for num_budgets in WINDOWS:
            for shown, budget, least in windows(sweep, num_budgets):
                for method, words, found in predictions(shown, arguments.draws):
                    loss = predict(found, np.array([budget])).loss.at(0)
                    case = {
                        "sweep": label,
                        "method": method,
                        "num_budgets": num_budgets,
                        "compute_budget": budget,
                        "fitted": words,
                    }
                    numbers = {"loss": Metric.from_estimate(loss), "observed_loss": least}
                    append_record(arguments.store, "scaling_backtest", case, numbers)
                    error = loss.value / least - 1
                    print(f"{label}, {num_budgets} budgets to {budget:.3g}: {words} {error:+.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
