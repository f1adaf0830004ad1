"""Writes `planner/data/pooled.json`: what frameworks share, and how far an unseen one is off.

    OMP_NUM_THREADS=1 python -m studies.planner.pooled_prior --keep priors.pickle

Half-widths of intervals are those of `results/planner-unseen.jsonl`, `planner-known.jsonl` and
`planner-experts.jsonl`, which the studies of these names write. `--keep` takes the priors that they
have fitted.
"""

import argparse
import math
import pathlib
import sys

from paceline.planner.calibrations.calibration import ranges
from paceline.planner.calibrations.cases import Case, group_cases, predictable
from paceline.planner.calibrations.pooled import (
    KnownEffect,
    PooledFile,
    framework_posterior,
    write_pooled,
)
from paceline.planner.calibrations.pooling import representative
from paceline.planner.published import published_runs
from paceline.records import RecordStore
from studies.planner.experts import expert_prior
from studies.planner.unseen import NEW_DEVICE, FrameworkPriors

_RESULTS = pathlib.Path(__file__).parents[2] / "results"


def main() -> int:
    """Fits all frameworks and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=pathlib.Path, help="file for fitted priors")
    known = predictable(published_runs())
    priors = FrameworkPriors(known, parser.parse_args().keep)
    prior = priors.without()
    frameworks = {}
    for framework in priors.frameworks:
        rows, weights = representative(priors.cases_of(framework))
        posterior = priors.without(framework).fit(rows, weights=weights)
        frameworks[framework] = framework_posterior(priors.cases_of(framework), posterior)
    dense = [case for name in priors.frameworks for case in priors.cases_of(name)]
    mixtures = [case for case in known if case.experts is not None]
    unseen = _half_widths("planner-unseen.jsonl", "unseen_mean")
    content = PooledFile(
        constants=dict(prior.constants),
        effects=tuple(KnownEffect(*effect, *its) for effect, its in prior.effects.items()),
        half_widths={
            count: width for (how, count), width in unseen.items() if how in ("none", "random")
        },
        half_width_of_new_device=unseen[NEW_DEVICE, 0],
        half_width_of_drawn=_half_widths("planner-known.jsonl", "known_mean")["drawn", 0],
        seen=_seen(dense),
        frameworks=frameworks,
        experts=framework_posterior(mixtures, expert_prior(priors).fit(mixtures)),
        half_width_of_experts=_half_widths("planner-experts.jsonl", "experts_mean")["", 0],
        seen_experts=_seen(mixtures),
    )
    write_pooled(content)
    return 0


def _half_widths(name: str, study: str) -> dict[tuple[str, int], float]:
    """Returns the logarithms of the intervals' factors, by how runs were chosen and how many."""
    found = {}
    for record in RecordStore(_RESULTS / name).read():
        if record.case["study"] == study:
            key = str(record.case.get("how") or ""), int(str(record.case.get("num_own_runs") or 0))
            found[key] = math.log1p(record.metrics["half_width"].value)
    return found


def _seen(cases: list[Case]) -> dict[str, tuple[float, float]]:
    return ranges([(group.layouts, group.workload) for group in group_cases(cases)])


if __name__ == "__main__":
    sys.exit(main())
