"""Measures the CPU time of parametric fits by number of runs, on one core.

    OMP_NUM_THREADS=1 python -m studies.scaling.speed results/scaling-speed.jsonl

Appends one `scaling_study` record per number of runs to the store.
"""

import sys
import time

import numpy as np

from paceline.scaling import SweepDesign, synthetic_sweep
from paceline.scaling.fits.least_squares import fit_projection
from paceline.scaling.fits.parametric import fit_parametric
from paceline.scaling.surface import EPOCH
from paceline.scaling.sweep import draw_counts
from studies.harness.records import append_record
from studies.harness.study import in_fresh_process, resident_peak_bytes, study_parser

_NOISE = 0.005
_DRAWS = 1000
_REPEATS = 5


def measure(num_budgets: int) -> tuple[int, dict[str, float]]:
    """Returns the number of runs, and the cost of a fit and a bootstrap."""
    budgets = tuple(np.geomspace(1e18, 1e21, num_budgets))
    sweep = synthetic_sweep(EPOCH, SweepDesign(budgets=budgets), noise=_NOISE)
    seconds = []
    for _ in range(_REPEATS):
        began = time.process_time()
        fit_projection(sweep.parameters, sweep.tokens, sweep.loss)
        seconds.append(time.process_time() - began)
    counts = draw_counts(sweep, _DRAWS)
    began = time.process_time()
    fit_parametric(sweep, counts)
    bootstrap = time.process_time() - began
    assert "torch" not in sys.modules
    return len(sweep), {
        "fit_time_s": float(np.median(seconds)),
        "bootstrap_time_s": bootstrap,
        "resident_peak_bytes": resident_peak_bytes(),
    }


def main() -> int:
    """Measures each size in a process of its own."""
    arguments = study_parser(__doc__).parse_args()
    for num_budgets in (9, 125, 1250):
        num_runs, numbers = in_fresh_process(measure, num_budgets)
        case = {"study": f"speed with {num_runs} runs", "noise": _NOISE, "num_draws": _DRAWS}
        append_record(arguments.store, "scaling_study", case, numbers)
        print(num_runs, numbers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
