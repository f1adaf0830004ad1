"""Tests of the prior that frameworks share: what few runs and none make of it."""

import dataclasses

import numpy as np
import pytest

from paceline.planner.calibrations.cases import Case, Variant, predictable
from paceline.planner.calibrations.parameters import PRIORS
from paceline.planner.calibrations.pooling import deviations, pool, representative, summarize
from paceline.planner.calibrations.predictor import Effect, Predictor, with_effects
from paceline.planner.calibrations.prior import (
    CONSTANTS,
    Known,
    PooledPrior,
    effects_of,
    effects_of_variant,
    generation,
)
from paceline.planner.published import PublishedRun

PRIOR = PooledPrior(
    constants={
        name: Known(float(np.log(PRIORS[name].mean)), 0.5 * PRIORS[name].deviation)
        for name in CONSTANTS
    },
    effects={Effect("matmul_share", "device", "h100-sxm"): Known(-0.1, 0.1)},
)
HOPPER = Variant("h100-sxm", "bfloat16")


def _run(framework: str, model: str, tensor: int, context: int = 2048) -> PublishedRun:
    data = 16 // tensor
    return PublishedRun(
        id=f"{framework}-{model}-{tensor}-{context}",
        source="test",
        framework=framework,
        model=model,
        device="h100-sxm",
        precision="bf16",
        unit="s/iteration",
        measured=1.0,
        devices=16,
        context_length=context,
        global_batch=data * 2,
        micro_batch=1,
        tensor=tensor,
        data=data,
        zero=1,
    )


def _cases(framework: str, slowdown: float = 1.0, **changes: float) -> list[Case]:
    """Returns runs of a framework whose constants are the prior's means times the changes."""
    runs = [
        _run(framework, model, tensor, context)
        for model in ("llama3-8B", "llama3-70B")
        for tensor in (1, 4, 8)
        for context in (1024, 8192)
    ]
    cases = predictable(runs)
    point = PRIOR.fit((), also=[HOPPER])
    moved = point.point.copy()
    for name, factor in {**changes, "slowdown": slowdown}.items():
        moved[CONSTANTS.index(name)] += np.log(factor)
    seconds = np.exp(Predictor(cases, CONSTANTS, effects_of, point.effects)(moved)[0])
    return [
        dataclasses.replace(case, step_s=float(its))
        for case, its in zip(cases, seconds, strict=True)
    ]


def test_without_runs_the_means_predict() -> None:
    cases = _cases("mine")
    posterior = PRIOR.fit((), also=[case.variant for case in cases])
    predicted, deviation = posterior.predict(cases)
    assert predicted == pytest.approx(np.log([case.step_s for case in cases]))
    assert np.all(deviation > 0.1)


def test_one_run_of_a_slow_framework_predicts_its_others() -> None:
    cases = _cases("mine", slowdown=1.3)
    measured = np.log([case.step_s for case in cases])
    before, wide = PRIOR.fit((), also=[HOPPER]).predict(cases[1:])
    after, narrow = PRIOR.fit(cases[:1]).predict(cases[1:])
    assert np.abs(before - measured[1:]).mean() > 0.25
    assert np.abs(after - measured[1:]).mean() < 0.1
    assert np.all(narrow < wide)


def test_many_runs_outweigh_the_prior() -> None:
    cases = _cases("mine", slowdown=1.2, inner_share=0.5)
    predicted, _ = PRIOR.fit(cases).predict(cases)
    assert predicted == pytest.approx(np.log([case.step_s for case in cases]), abs=0.03)


def test_a_weight_counts_a_run_as_so_many() -> None:
    cases = _cases("mine", slowdown=1.3)
    lightly = PRIOR.fit(cases, weights=np.full(len(cases), 0.01))
    fully = PRIOR.fit(cases)
    assert np.trace(lightly.covariance) > np.trace(fully.covariance)
    place = CONSTANTS.index("slowdown")
    assert abs(lightly.point[place]) < abs(fully.point[place])


def test_effects_multiply_and_shares_stay_below_one() -> None:
    effect = Effect("matmul_share", "device", "h100-sxm")
    values = with_effects({"matmul_share": 0.5}, {effect: np.log(1.5)}, [effect])
    assert values["matmul_share"] == pytest.approx(0.75)
    values = with_effects({"matmul_share": 0.9}, {effect: np.log(1.5)}, [effect])
    assert values["matmul_share"] == 1.0
    other = Effect("matmul_share", "device", "b200-sxm")
    assert with_effects({"matmul_share": 0.5}, {effect: 1.0}, [other])["matmul_share"] == 0.5


def test_devices_dtypes_and_modes_have_effects() -> None:
    kinds = {each.kind for each in effects_of_variant(Variant("b200-sxm", "float8", "eager"))}
    assert kinds == {"device", "generation", "dtype", "mode"}
    assert {each.kind for each in effects_of_variant(HOPPER)} == {"device", "generation"}
    assert generation("h200-sxm") == generation("h100-500w-hbm2e") == "hopper"
    assert generation("gb300") == "blackwell"
    assert generation("tpu-v5p") == "tpu-v5p"


def test_pooling_finds_how_far_frameworks_differ() -> None:
    """Frameworks whose links differ by a factor of two, and nothing else."""
    frameworks = {"fast": 1.4, "slow": 0.7, "usual": 1.0}
    cases = {name: _cases(name, inner_share=share) for name, share in frameworks.items()}
    summaries = [summarize(each) for each in cases.values()]
    spread = deviations(summaries)
    alike = deviations([summarize(_cases(name)) for name in frameworks])
    assert spread["inner_share"] > 1.2 * alike["inner_share"]
    prior = pool([case for each in cases.values() for case in each], summaries)
    assert set(prior.constants) == set(CONSTANTS)
    posterior = prior.fit((), also=[HOPPER])
    predicted, _ = posterior.predict(cases["usual"])
    measured = np.log([case.step_s for case in cases["usual"]])
    assert np.abs(predicted - measured).mean() < 0.15


def test_a_family_with_many_rows_counts_as_forty() -> None:
    cases = _cases("mine") * 30
    sampled, weights = representative([*cases, *_cases("other")])
    assert len(sampled) < len(cases)
    assert weights[: len(sampled) - 12].sum() == pytest.approx(40)
    assert np.all(weights[-12:] == 1)
