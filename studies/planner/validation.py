"""Predicts published runs of dense models, each held out; records errors, coverage and regret.

    OMP_NUM_THREADS=1 python -m studies.planner.validation results/planner-validation.jsonl

Pools of `relatives.DRAWN` are drawn from what the other frameworks share; --keep takes the priors
that `studies.planner.unseen` has fitted. --calibrations also writes the fitted calibrations,
--without drops one term from every fit of rows by themselves to record its effect, and --pools
selects some pools. Appends `planner_validation` records: accuracy and regret by source.
"""

import pathlib
import sys

import numpy as np

from paceline.planner.calibrations.calibration import write_calibrations
from paceline.planner.calibrations.cases import predictable
from paceline.planner.calibrations.parameters import terms_of
from paceline.planner.calibrations.relatives import DRAWN, relatives_of
from paceline.planner.published import published_runs
from studies.harness.records import append_record
from studies.harness.study import study_parser
from studies.planner.held_out import PoolResult, validate_drawn_pool, validate_pool
from studies.planner.regret import sweep_regrets
from studies.planner.unseen import FrameworkPriors

LEAST_ROWS = 6


def accuracy(source: str, results: list[PoolResult]) -> dict[str, float]:
    """Returns errors and interval coverage over all predicted rows of a source."""
    predicted = np.concatenate([each.predicted for each in results])
    measured = np.concatenate([each.measured for each in results])
    low = np.concatenate([each.low for each in results])
    high = np.concatenate([each.high for each in results])
    known = np.isfinite(predicted)
    error = np.abs(predicted[known] / measured[known] - 1)
    covered = (low[known] <= measured[known]) & (measured[known] <= high[known])
    return {
        "rows": float(known.sum()),
        "models": float(len({case.run.model for each in results for case in each.cases})),
        "mean_error": float(error.mean()),
        "median_error": float(np.median(error)),
        "largest_error": float(error.max()),
        "coverage": float(covered.mean()),
        **{
            f"ratio_p{percent}": float(np.percentile(predicted[known] / measured[known], percent))
            for percent in (5, 25, 50, 75, 95)
        },
        "half_width": float(np.median(np.sqrt(high[known] / low[known]) - 1)),
    }


def regret(results: list[PoolResult]) -> dict[str, float]:
    """Returns the regrets over the sweeps of a source."""
    found = [each for result in results for each in sweep_regrets(result.cases, result.predicted)]
    if not found:
        return {}
    return {
        "sweeps": float(len(found)),
        "layouts": float(sum(each.num_layouts for each in found)),
        "first": float(np.mean([each.first for each in found])),
        "largest_first": float(max(each.first for each in found)),
        "best_of_three": float(np.mean([each.best_of_three for each in found])),
        "random": float(np.mean([each.random for each in found])),
        "rule_of_thumb": float(np.mean([each.rule_of_thumb for each in found])),
    }


def main() -> int:
    """Validates every pool and records the results by source."""
    parser = study_parser(__doc__)
    parser.add_argument("--calibrations", type=pathlib.Path)
    parser.add_argument("--without", default="")
    parser.add_argument("--pools", nargs="*", default=[])
    parser.add_argument("--keep", type=pathlib.Path, help="file for fitted priors")
    arguments = parser.parse_args()
    everything = [case for case in predictable(published_runs()) if case.experts is None]
    priors = FrameworkPriors(everything, arguments.keep)
    pools: dict[str, list] = {}
    for case in everything:
        pools.setdefault(case.pool, []).append(case)
    results = []
    for pool, cases in sorted(pools.items()):
        skipped = arguments.without and (pool in DRAWN or arguments.without not in terms_of(pool))
        if len(cases) < LEAST_ROWS or skipped or (arguments.pools and pool not in arguments.pools):
            continue
        if pool in DRAWN and not arguments.without:
            prior = priors.without(cases[0].framework)
            results.append(validate_drawn_pool(cases, relatives_of(cases, everything), prior))
        else:
            results.append(validate_pool(cases, without=arguments.without or None))
        print(pool, len(cases), accuracy(pool, results[-1:]), regret(results[-1:]), flush=True)
    names = sorted({each.source for each in results})
    for name in [*names, *([] if arguments.without or arguments.pools else ["all"])]:
        chosen = [each for each in results if name in ("all", each.source)]
        for study, values in (("accuracy", accuracy(name, chosen)), ("regret", regret(chosen))):
            if values:
                case = {"study": study, "source": name, "without": arguments.without}
                append_record(arguments.store, "planner_validation", case, values)
    if arguments.calibrations is not None:
        write_calibrations(
            [made for each in results for made in each.calibrations], arguments.calibrations
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
