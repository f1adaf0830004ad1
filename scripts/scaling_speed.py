"""Measures the CPU time of parametric fits by number of runs, on one core.

    OMP_NUM_THREADS=1 python scripts/scaling_speed.py results/scaling-speed.jsonl

Appends one `scaling_study` record per number of runs to the store.
"""

import argparse
import pathlib
import resource
import subprocess
import sys
import time

import numpy as np

from paceline.records import Metric, Record, RecordStore, capture_environment
from paceline.scaling import SweepDesign, synthetic_sweep
from paceline.scaling.fits.least_squares import fit_projection
from paceline.scaling.fits.parametric import fit_parametric
from paceline.scaling.surface import EPOCH
from paceline.scaling.sweep import draw_counts

_NOISE = 0.005
_DRAWS = 1000
_REPEATS = 5


def measure(num_budgets: int) -> None:
    """Prints the number of runs, CPU seconds of a fit and a bootstrap, and peak resident bytes."""
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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(len(sweep), float(np.median(seconds)), bootstrap, peak, "torch" in sys.modules)


def main() -> int:
    """Measures each size in a separate process, because peak memory is per process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=pathlib.Path)
    parser.add_argument("--num-budgets", type=int)
    arguments = parser.parse_args()
    if arguments.num_budgets:
        measure(arguments.num_budgets)
        return 0
    store = RecordStore(arguments.store)
    for num_budgets in (9, 125, 1250):
        command = [sys.executable, __file__, str(arguments.store)]
        result = subprocess.run(
            [*command, "--num-budgets", str(num_budgets)],
            capture_output=True,
            text=True,
            check=True,
        )
        num_runs, fit_s, bootstrap_s, peak_bytes, has_torch = result.stdout.split()
        assert has_torch == "False"
        values = {
            "fit_time_s": float(fit_s),
            "bootstrap_time_s": float(bootstrap_s),
            "resident_peak_bytes": float(peak_bytes),
        }
        store.append(
            Record(
                kind="scaling_study",
                case={"study": f"speed with {num_runs} runs", "noise": _NOISE, "num_draws": _DRAWS},
                environment=capture_environment(),
                metrics={name: Metric(value=value) for name, value in values.items()},
                outcome="ok",
            )
        )
        print(num_runs, values)
    return 0


if __name__ == "__main__":
    sys.exit(main())
