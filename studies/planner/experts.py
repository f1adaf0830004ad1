"""Predicts runs of mixtures of experts with one model left out, and runs that no choice has seen.

    OMP_NUM_THREADS=1 python -m studies.planner.experts results/planner-experts.jsonl

The prior of constants is that of dense frameworks (`studies.planner.unseen`), with the slowdown of
Megatron-Bridge's dense runs; the runs of all models but one draw it to them, with the constants of
experts and the effects of releases. An interval's half-width is the 90% quantile of the other
models' errors, weighed equally. `planner_validation` records: `experts` by model, `experts_mean`
over runs, and `prospective` by source for the runs in `studies.planner.prospective`, which were
added after terms and priors had been chosen.
"""

import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from paceline.planner.calibrations.cases import Array, Case, predictable
from paceline.planner.calibrations.prior import CONSTANTS, PooledPrior
from paceline.planner.published import published_runs
from studies.harness.records import append_record
from studies.harness.study import study_parser
from studies.planner.prospective import prospective_runs
from studies.planner.unseen import FrameworkPriors, half_width

_FRAMEWORK = "megatron-bridge"


def expert_prior(priors: FrameworkPriors) -> PooledPrior:
    """Returns the prior of Megatron-Bridge's mixtures, from dense runs alone."""
    dense = priors.without().fit(priors.cases_of(_FRAMEWORK))
    return priors.without().of_experts(float(dense.point[CONSTANTS.index("slowdown")]))


def held_out(prior: PooledPrior, cases: Sequence[Case]) -> dict[str, Array]:
    """Returns the log ratios of each model's runs after those of all other models."""
    found = {}
    for model in sorted({case.run.model for case in cases}):
        own = [case for case in cases if case.run.model == model]
        others = [case for case in cases if case.run.model != model]
        posterior = prior.fit(others, also=[case.variant for case in own])
        found[model] = posterior.predict(own)[0] - np.log([case.step_s for case in own])
    return found


def report(
    store: pathlib.Path, study: str, ratios: dict[str, Array], widths: dict[str, float]
) -> None:
    """Records the errors of each source, and of all runs together."""
    for source, own in ratios.items():
        errors = np.abs(np.exp(own) - 1)
        values = {
            "mean_error": float(errors.mean()),
            "median_error": float(np.median(errors)),
            "bias": float(np.exp(own.mean()) - 1),
            "coverage": float(np.mean(np.abs(own) <= widths[source])),
            "half_width": float(np.expm1(widths[source])),
            "rows": float(len(own)),
        }
        case = {"study": study, "source": source, "without": ""}
        append_record(store, "planner_validation", case, values)
        print(study, source, {name: round(value, 3) for name, value in values.items()}, flush=True)


def main() -> int:
    """Runs the study."""
    parser = study_parser(__doc__)
    parser.add_argument("--keep", type=pathlib.Path, help="file for fitted priors")
    parser.add_argument("--prospective", action="store_true", help="also the runs not yet seen")
    arguments = parser.parse_args()
    known = predictable(published_runs())
    priors = FrameworkPriors(known, arguments.keep)
    prior = expert_prior(priors)
    cases = [case for case in known if case.experts is not None]
    ratios = held_out(prior, cases)
    widths = {
        model: half_width({name: own for name, own in ratios.items() if name != model})
        for model in ratios
    }
    report(arguments.store, "experts", ratios, widths)
    together = np.concatenate(list(ratios.values()))
    report(arguments.store, "experts_mean", {"all": together}, {"all": half_width(ratios)})
    if arguments.prospective:
        posterior = prior.fit(cases)
        unseen: dict[str, Array] = {}
        for source, runs in prospective_runs().items():
            own = predictable(runs)
            also = [case.variant for case in own]
            posterior = prior.fit(cases, also=also)
            unseen[source] = posterior.predict(own)[0] - np.log([case.step_s for case in own])
        report(arguments.store, "prospective", unseen, dict.fromkeys(unseen, half_width(ratios)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
