"""Tests of fits drawn from what all frameworks share, by the runs of a pool and its relatives."""

import dataclasses
import functools

import msgspec
import numpy as np
import pytest

from paceline.core.errors import UsageError
from paceline.planner.calibrations.calibration import find_calibration, known_calibrations
from paceline.planner.calibrations.cases import Case, predictable
from paceline.planner.calibrations.pooled import ENOUGH_ROWS, calibrate_rows, pooled
from paceline.planner.calibrations.relatives import DRAWN, fit_with_relatives, relatives_of
from paceline.planner.published import published_runs


@functools.cache
def _published() -> tuple[Case, ...]:
    return tuple(predictable(published_runs()))


def _of_pool(pool: str) -> list[Case]:
    return [case for case in _published() if case.pool == pool]


@pytest.mark.parametrize(
    ("pool", "families"),
    [
        ("torchtitan", {"llm-foundry", "fms-fsdp"}),
        ("megatron-bridge", {"nemo"}),
        ("nemo-blackwell", {"nemo"}),
        ("vtrain", {"vtrain-host"}),
        ("bloom", set()),
    ],
)
def test_relatives_have_the_same_kernels(pool: str, families: set[str]) -> None:
    found = relatives_of(_of_pool(pool), _published())
    assert {case.family for case in found} == families
    assert all(case.pool != pool and case.experts is None for case in found)


def test_more_rows_of_relatives_do_not_outweigh_a_framework() -> None:
    own = _of_pool("torchtitan")[::4]
    relatives = relatives_of(own, _published())[::4]
    prior = pooled().prior
    once = fit_with_relatives(prior, own, relatives)
    thrice = fit_with_relatives(prior, own, relatives * 3)
    assert len(relatives) > 30
    np.testing.assert_allclose(thrice.predict(own)[0], once.predict(own)[0], atol=1e-3)
    alone = fit_with_relatives(prior, own)
    assert np.max(np.abs(alone.predict(own)[0] - once.predict(own)[0])) > 1e-3


def test_rows_of_a_framework_with_few_models_are_drawn_with_the_published_ones() -> None:
    usual = [case for case in _of_pool("torchtitan") if not case.variant.variation]
    own = [case for case in usual if case.variant == usual[0].variant][:2]
    made = calibrate_rows(own, with_published=True)
    assert {each.framework for each in made} == {"torchtitan"}
    assert sum(len(each.rows) for each in made) > 20
    assert {each.half_width() for each in made} == {pooled().half_width_of_drawn}
    # Two rows alone have the interval of frameworks with as few.
    (alone,) = calibrate_rows(own, with_published=False)
    assert alone.half_width() == pooled().half_width(2)


@pytest.mark.parametrize(
    ("alias", "published"),
    [
        ("megatron-lm", "Megatron-LM"),
        ("MEGATRON-LM 2022", "Megatron-LM 2022"),
        ("fsdp", "fms-fsdp (PyTorch FSDP, compile)"),
        ("megatron-core", "NeMo"),
        ("megatron-bridge", "Megatron-Bridge 26.02 NeMo Container"),
    ],
)
def test_other_names_of_a_framework_find_its_published_runs(alias: str, published: str) -> None:
    cases = [case for case in _published() if case.run.framework == published]
    case = next(case for case in cases if not case.variant.variation)
    run = msgspec.structs.replace(case.run, framework=alias, id="own")
    own = dataclasses.replace(case, run=run)
    assert own.pool == case.pool
    assert own.release in ("", case.release)
    (alone,) = calibrate_rows([own], with_published=False)
    assert alone.framework == case.family
    with_published = calibrate_rows([own], with_published=True)
    assert sum(len(each.rows) for each in with_published) > 5


def test_a_calibration_is_found_by_other_names_of_its_framework() -> None:
    found = find_calibration("megatron-lm", "a100-sxm-80gb", "bfloat16")
    assert found.framework == "megatron-2023"
    with pytest.raises(UsageError, match="did you mean 'megatron-lm'"):
        find_calibration("megatronlm", "a100-sxm-80gb", "bfloat16")


def test_bundled_calibrations_are_drawn_where_that_is_better() -> None:
    pool_of = {case.run.id: case.pool for case in _published()}
    for each in known_calibrations():
        (pool,) = {pool_of[row] for row in each.rows}
        is_drawn = each.half_width_elsewhere is not None
        assert is_drawn == (pool in DRAWN), each.name
        if is_drawn:
            has_many = len(_of_pool(pool)) >= ENOUGH_ROWS
            few = pooled().half_width(len(each.rows))
            assert each.half_width() == (pooled().half_width_of_drawn if has_many else few)
