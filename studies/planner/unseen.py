"""Predicts runs of frameworks that the planner has never seen, before and after a few of theirs.

    OMP_NUM_THREADS=1 python -m studies.planner.unseen results/planner-unseen.jsonl

One framework at a time is left out of everything: the means, effects and deviations come from the
others. Its runs are predicted without any of them, then after k of them, drawn at random (`--draws`
times) or chosen by `next_run`, then after all on its other devices; always tested on its other
runs. Frameworks are weighed equally. An interval's half-width is the 90% quantile of the other
frameworks' errors, and is tested on the one that is left out. `planner_validation` records:
`unseen` by framework and k, `unseen_mean` over frameworks, `unseen_regret` by framework.
`studies.planner.pooled_prior` bundles the prior of all frameworks with these half-widths.
"""

import argparse
import collections
import dataclasses
import pathlib
import pickle
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from paceline.accounting.intervals import weighted_quantile
from paceline.planner.calibrations.cases import Array, Case, predictable
from paceline.planner.calibrations.next_run import choose_runs
from paceline.planner.calibrations.pooling import Summary, pool, representative, summarize
from paceline.planner.calibrations.predictor import Predictor
from paceline.planner.calibrations.prior import CONSTANTS, PooledPrior, effects_of
from paceline.planner.published import published_runs
from studies.harness.records import append_record
from studies.harness.study import study_parser
from studies.planner.regret import sweep_regrets

COUNTS = (0, 1, 2, 3, 5, 12)
"""Numbers of the framework's own runs."""
NEW_DEVICE = "new device"
_LEAST_ROWS = 6
_MOST_TESTED = 150


@dataclasses.dataclass(frozen=True, kw_only=True)
class Errors:
    """Log ratios of predicted to measured seconds of one framework's runs, by how many it had."""

    framework: str
    count: int
    how: str
    """How the runs were chosen: random, chosen, those of other devices, or none."""
    ratios: Array


class FrameworkPriors:
    """The prior of each framework, from the runs of all others; fitted once and kept in a file."""

    def __init__(self, cases: Sequence[Case], kept: pathlib.Path | None = None) -> None:
        self._kept = kept
        self._cases = [case for case in cases if case.experts is None]
        self.frameworks = sorted({case.framework for case in self._cases})
        self._fitted: dict[str, PooledPrior] = {}
        self._summaries: list[Summary] = []
        if kept is not None and kept.exists():
            self._summaries, self._fitted = pickle.loads(kept.read_bytes())

    def cases_of(self, framework: str) -> list[Case]:
        """Returns the runs of a framework."""
        return [case for case in self._cases if case.framework == framework]

    def without(self, *frameworks: str) -> PooledPrior:
        """Returns the prior of a framework that is like none of these."""
        key = " ".join(sorted(frameworks))
        if key not in self._fitted:
            others = [case for case in self._cases if case.framework not in frameworks]
            summaries = [each for each in self.summaries if each.framework not in frameworks]
            self._fitted[key] = pool(others, summaries)
            if self._kept is not None:
                self._kept.write_bytes(pickle.dumps((self._summaries, self._fitted)))
        return self._fitted[key]

    @property
    def summaries(self) -> list[Summary]:
        """The pools' own fits."""
        if not self._summaries:
            pools: dict[str, list[Case]] = collections.defaultdict(list)
            for case in self._cases:
                pools[case.pool].append(case)
            self._summaries = [summarize(each) for each in pools.values()]
        return self._summaries


def units(cases: Sequence[Case]) -> list[list[Case]]:
    """Returns runs that one user could have: of one device and one campaign, in the usual mode."""
    found: dict[tuple[str, str], list[Case]] = collections.defaultdict(list)
    for case in cases:
        if not case.variant.variation:
            found[case.family, case.device].append(case)
    return [each for each in found.values() if len(each) >= _LEAST_ROWS]


def errors_without_rows(priors: FrameworkPriors) -> Iterator[Errors]:
    """Yields the errors of every framework before any of its runs."""
    for framework in priors.frameworks:
        cases = priors.cases_of(framework)
        posterior = priors.without(framework).fit((), also=[case.variant for case in cases])
        predicted, _ = posterior.predict(cases)
        measured = np.log([case.step_s for case in cases])
        yield Errors(framework=framework, count=0, how="none", ratios=predicted - measured)


def errors_with_rows(priors: FrameworkPriors, draws: int) -> Iterator[Errors]:
    """Yields the errors after some of a framework's runs, drawn at random and chosen."""
    for framework in priors.frameworks:
        for cases in units(priors.cases_of(framework)):
            generator = np.random.default_rng(7)
            for count in COUNTS[1:]:
                if len(cases) < count + 3:
                    continue
                for _ in range(draws):
                    own = generator.permutation(len(cases))[:count].tolist()
                    yield _after(priors, framework, cases, own, "random", generator)
            for own in _chosen(priors, framework, cases):
                if len(cases) >= len(own) + 3:
                    yield _after(priors, framework, cases, own, "chosen", generator)


def errors_on_new_devices(priors: FrameworkPriors) -> Iterator[Errors]:
    """Yields the errors on each device of a framework after its runs on the others."""
    for framework in priors.frameworks:
        cases = [case for case in priors.cases_of(framework) if not case.variant.variation]
        for device in sorted({case.device for case in cases}):
            tested = [case for case in cases if case.device == device]
            rows, weights = representative([case for case in cases if case.device != device])
            if not rows:
                continue
            also = [case.variant for case in tested]
            posterior = priors.without(framework).fit(rows, weights=weights, also=also)
            ratios = posterior.predict(tested)[0] - np.log([case.step_s for case in tested])
            yield Errors(framework=framework, count=len(rows), how=NEW_DEVICE, ratios=ratios)


def _chosen(priors: FrameworkPriors, framework: str, cases: Sequence[Case]) -> list[list[int]]:
    """Returns the rows that the advice chooses among a framework's runs, for each count."""
    prior = priors.without(framework).fit((), also=[case.variant for case in cases])
    predictor = Predictor(cases, CONSTANTS, effects_of, prior.effects)
    _, slopes = predictor.slopes(prior.point)
    best = choose_runs(slopes, prior.covariance, max(COUNTS))
    return [best[:count] for count in COUNTS[1:]]


def _after(
    priors: FrameworkPriors,
    framework: str,
    cases: Sequence[Case],
    own: Sequence[int],
    how: str,
    generator: np.random.Generator,
) -> Errors:
    others = np.setdiff1d(np.arange(len(cases)), own)
    if len(others) > _MOST_TESTED:
        others = generator.permutation(others)[:_MOST_TESTED]
    tested = [cases[index] for index in others]
    rows = [cases[index] for index in own]
    posterior = priors.without(framework).fit(rows, also=[case.variant for case in tested])
    predicted, _ = posterior.predict(tested)
    ratios = predicted - np.log([case.step_s for case in tested])
    return Errors(framework=framework, count=len(rows), how=how, ratios=ratios)


def by_framework(errors: Sequence[Errors], count: int | None, how: str) -> dict[str, Array]:
    """Returns the log ratios of every framework with so many runs; None for any number."""
    found: dict[str, list[Array]] = collections.defaultdict(list)
    for each in errors:
        if each.how == how and count in (None, each.count):
            found[each.framework].append(each.ratios)
    return {framework: np.concatenate(ratios) for framework, ratios in found.items()}


def half_width(ratios: dict[str, Array]) -> float:
    """Returns the log of the 90% interval's factor: a quantile with frameworks weighed equally."""
    values = np.concatenate([np.abs(own) for own in ratios.values()])
    weights = np.concatenate([np.full(len(own), 1 / len(own)) for own in ratios.values()])
    return weighted_quantile(values, weights, 0.9)


def report(errors: Sequence[Errors], store: pathlib.Path) -> None:
    """Records the errors and intervals by number of own runs."""
    kinds = {(each.how, None if each.how == NEW_DEVICE else each.count) for each in errors}
    for how, count in sorted(kinds, key=str):
        ratios = by_framework(errors, count, how)
        means, covered, widths = [], [], []
        for framework, own in ratios.items():
            others = {name: each for name, each in ratios.items() if name != framework}
            width = half_width(others)
            inside = float(np.mean(np.abs(own) <= width))
            error = float(np.mean(np.abs(np.exp(own) - 1)))
            case = {
                "study": "unseen",
                "source": framework,
                "without": "",
                "num_own_runs": count or 0,
            }
            values = {
                "mean_error": error,
                "median_error": float(np.median(np.abs(np.exp(own) - 1))),
                "bias": float(np.exp(np.mean(own)) - 1),
                "coverage": inside,
                "half_width": float(np.exp(width) - 1),
                "rows": float(len(own)),
            }
            append_record(store, "planner_validation", {**case, "how": how}, values)
            means.append(error)
            covered.append(inside)
            widths.append(width)
        values = {
            "frameworks": float(len(ratios)),
            "mean_error": float(np.mean(means)),
            "largest_error": float(max(means)),
            "coverage": float(np.mean(covered)),
            "frameworks_covered": float(np.sum(np.array(covered) >= 0.8)),
            "half_width": float(np.exp(half_width(ratios)) - 1),
        }
        case = {"study": "unseen_mean", "source": "all", "without": "", "num_own_runs": count or 0}
        append_record(store, "planner_validation", {**case, "how": how}, values)
        print(how, count, {name: round(value, 3) for name, value in values.items()}, flush=True)


def regrets(priors: FrameworkPriors) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Yields (family, own runs, regrets) of picking layouts in published sweeps."""
    for framework in priors.frameworks:
        families: dict[str, list[Case]] = collections.defaultdict(list)
        for case in priors.cases_of(framework):
            families[case.family].append(case)
        for family, cases in families.items():
            generator = np.random.default_rng(5)
            for count in (0, 3):
                found = []
                for _ in range(4 if count else 1):
                    own = generator.permutation(len(cases))[:count]
                    posterior = priors.without(framework).fit(
                        [cases[index] for index in own], also=[case.variant for case in cases]
                    )
                    found += sweep_regrets(cases, np.exp(posterior.predict(cases)[0]))
                if found:
                    values = {
                        "sweeps": float(len(found)),
                        "first": float(np.mean([each.first for each in found])),
                        "best_of_three": float(np.mean([each.best_of_three for each in found])),
                        "rule_of_thumb": float(np.mean([each.rule_of_thumb for each in found])),
                    }
                    yield family, count, values


def main() -> int:
    """Runs the study."""
    parser: argparse.ArgumentParser = study_parser(__doc__)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--keep", type=pathlib.Path, help="file for fitted priors")
    arguments = parser.parse_args()
    priors = FrameworkPriors(predictable(published_runs()), arguments.keep)
    errors = []
    for each in errors_without_rows(priors):
        print(each.framework, f"{np.mean(np.abs(np.exp(each.ratios) - 1)):.1%}", flush=True)
        errors.append(each)
    errors += errors_with_rows(priors, arguments.draws)
    errors += errors_on_new_devices(priors)
    report(errors, arguments.store)
    for family, count, values in regrets(priors):
        case = {"study": "unseen_regret", "source": family, "without": "", "num_own_runs": count}
        append_record(arguments.store, "planner_validation", {**case, "how": "random"}, values)
        print(family, count, values, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
