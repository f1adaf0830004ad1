"""Fits of frameworks with published runs: alone, or drawn from what all frameworks share?

    OMP_NUM_THREADS=1 python -m studies.planner.known results/planner-known.jsonl --keep FILE

Ways to predict a model of a pool whose other models are known:

    own      a fit of the pool's rows alone, with the terms of `parameters.terms_of`
    drawn    the prior of all other frameworks, drawn to the pool's rows and those of its relatives
    pooled   the same without relatives, where the pool has some

The nested choice takes, for each fold of models that is left out, the way that is best on the
pool's other folds, each predicted without itself and without the fold that is left out. An interval
is the 90% quantile of the other pools' held-out errors, with pools weighed equally.
`planner_validation` records: `known` by pool and way, of which `nested` is the choice.
`relatives.DRAWN` has the pools for which `drawn` is best.
"""

import collections
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from paceline.planner.calibrations.cases import Array, Case, group_cases, predictable
from paceline.planner.calibrations.fit import fit_cases, held_out_by, predict_groups
from paceline.planner.calibrations.parameters import terms_of
from paceline.planner.calibrations.relatives import relatives_of
from paceline.planner.published import published_runs
from studies.harness.records import append_record
from studies.harness.study import study_parser
from studies.planner.held_out import predict_drawn
from studies.planner.unseen import FrameworkPriors, half_width

WAYS = ("own", "drawn", "pooled")
_MOST_FOLDS = 6
_FOLDS_OF_MANY = 3
_MANY_ROWS = 200
_LEAST_ROWS = 6


class Predictions:
    """Predicts one fold of a pool by each way, without other folds if asked."""

    def __init__(self, priors: FrameworkPriors, everything: Sequence[Case]) -> None:
        self._priors = priors
        self._everything = everything

    def __call__(self, way: str, rows: Sequence[Case], tested: Sequence[Case]) -> Array:
        """Returns the log ratios of predicted to measured seconds of `tested`, from `rows`."""
        measured = np.array([case.step_s for case in tested])
        if way == "own":
            fit = fit_cases(rows, terms=terms_of(rows[0].pool))
            return np.log(predict_groups(group_cases(list(tested)), fit, len(tested)) / measured)
        prior = self._priors.without(rows[0].framework)
        beside = relatives_of(rows, self._everything) if way == "drawn" else []
        return np.log(predict_drawn(prior, rows, beside, tested) / measured)

    def ways(self, cases: Sequence[Case]) -> list[str]:
        """Returns the ways that a pool has."""
        has = bool(relatives_of(cases, self._everything))
        return [way for way in WAYS if has or way != "pooled"]


def folds_of(cases: Sequence[Case]) -> list[str]:
    """Returns each case's fold: its model, several models together if there are many."""
    names = held_out_by(cases)
    most = _FOLDS_OF_MANY if len(cases) > _MANY_ROWS else _MOST_FOLDS
    order = {name: number % most for number, name in enumerate(sorted(set(names)))}
    return [str(order[name]) for name in names]


def evaluate(predict: Predictions, cases: Sequence[Case]) -> tuple[dict[str, Array], Array]:
    """Returns the held-out log ratios by way, and those of the nested choice."""
    folds = np.array(folds_of(cases))
    numbers = np.arange(len(cases))
    ways = predict.ways(cases)
    ratios = {way: np.full(len(cases), np.nan) for way in ways}
    nested = np.full(len(cases), np.nan)

    def of(index: Array) -> list[Case]:
        return [cases[number] for number in index]

    for fold in np.unique(folds):
        inside, others = numbers[folds == fold], numbers[folds != fold]
        if not len(others):
            continue
        for way in ways:
            ratios[way][inside] = predict(way, of(others), of(inside))
        inner: dict[str, list[Array]] = collections.defaultdict(list)
        for second in np.unique(folds[others]):
            tested, rest = others[folds[others] == second], others[folds[others] != second]
            if len(rest):
                for way in ways:
                    inner[way].append(predict(way, of(rest), of(tested)))
        # With two folds, no choice can be made: what others share is the safer guess.
        best = min(ways, key=lambda way: _error(np.concatenate(inner[way]))) if inner else "drawn"
        nested[inside] = ratios[best][inside]
    return ratios, nested


def _error(ratios: Array) -> float:
    return float(np.mean(np.abs(np.exp(ratios) - 1)))


def main() -> int:
    """Runs the study."""
    parser = study_parser(__doc__)
    parser.add_argument("--keep", type=pathlib.Path, help="file for fitted priors")
    parser.add_argument("--pools", nargs="*", default=[])
    arguments = parser.parse_args()
    everything = [case for case in predictable(published_runs()) if case.experts is None]
    predict = Predictions(FrameworkPriors(everything, arguments.keep), everything)
    pools: dict[str, list[Case]] = collections.defaultdict(list)
    for case in everything:
        pools[case.pool].append(case)
    found: dict[str, dict[str, Array]] = {}
    for pool, cases in sorted(pools.items()):
        if len(cases) < _LEAST_ROWS or (arguments.pools and pool not in arguments.pools):
            continue
        ratios, nested = evaluate(predict, cases)
        found[pool] = {**ratios, "nested": nested}
        errors = {way: f"{_error(own):.1%}" for way, own in found[pool].items()}
        print(pool, len(cases), errors, flush=True)
    for way in (*WAYS, "nested"):
        by_pool = {pool: ratios[way] for pool, ratios in found.items() if way in ratios}
        report(way, by_pool, arguments.store)
    return 0


def report(way: str, ratios: dict[str, Array], store: pathlib.Path) -> None:
    """Records the errors of a way by pool, with intervals from the other pools."""
    means = []
    for pool, own in ratios.items():
        width = half_width({name: each for name, each in ratios.items() if name != pool})
        values = {
            "mean_error": _error(own),
            "median_error": float(np.median(np.abs(np.exp(own) - 1))),
            "coverage": float(np.mean(np.abs(own) <= width)),
            "half_width": float(np.expm1(width)),
            "rows": float(len(own)),
        }
        means.append(values["mean_error"])
        case = {"study": "known", "source": pool, "without": "", "how": way}
        append_record(store, "planner_validation", case, values)
    values = {
        "mean_error": float(np.mean(means)),
        "half_width": float(np.expm1(half_width(ratios))),
    }
    case = {"study": "known_mean", "source": "all", "without": "", "how": way}
    append_record(store, "planner_validation", case, values)


if __name__ == "__main__":
    sys.exit(main())
