"""Tests of regret, computed by hand, and of one source's accuracy as stated in the docs."""

import numpy as np
import pytest

from paceline.planner.calibrations.cases import Case, predictable
from paceline.planner.published import PublishedRun, published_runs
from studies.planner.held_out import validate_pool
from studies.planner.regret import sweep_regrets, sweeps


def _cases() -> list[Case]:
    """Returns runs on eight devices in five layouts: tensor 1 to 8, and one with two stages."""
    meshes = [(1, 1, 1.5), (2, 1, 1.0), (4, 1, 1.2), (8, 1, 2.0), (1, 2, 1.1)]
    runs = [
        PublishedRun(
            id=f"{tensor}-{pipeline}",
            source="test",
            framework="test",
            model="llama3-8B",
            device="h100-sxm",
            precision="bf16",
            unit="s/iteration",
            measured=seconds,
            devices=8,
            context_length=1024,
            global_batch=64,
            micro_batch=1,
            tensor=tensor,
            pipeline=pipeline,
            data=8 // tensor // pipeline,
        )
        for tensor, pipeline, seconds in meshes
    ]
    return predictable(runs)


def test_regret_is_the_time_of_the_pick_over_the_best() -> None:
    cases = _cases()
    (regret,) = sweep_regrets(cases, np.array([3.0, 4.0, 2.0, 1.0, 5.0]))
    assert regret.num_layouts == 5
    assert regret.first == pytest.approx(1.0)
    assert regret.best_of_three == pytest.approx(0.2)
    assert regret.random == pytest.approx(0.36)
    assert regret.rule_of_thumb == pytest.approx(0.5)


def test_fewer_than_five_layouts_are_no_sweep() -> None:
    assert sweeps(_cases()[:4]) == []


def test_the_published_sweeps() -> None:
    cases = predictable(published_runs())
    assert len(cases) > 2_500
    assert len(sweeps(cases)) == 111


@pytest.mark.slow
def test_internevo_is_predicted_within_six_percent_without_its_number_of_devices() -> None:
    cases = [case for case in predictable(published_runs()) if case.pool == "internevo"]
    result = validate_pool(cases)
    errors = np.abs(result.predicted / result.measured - 1)
    assert errors.mean() < 0.06
    inside = (result.low <= result.measured) & (result.measured <= result.high)
    assert inside.mean() > 0.85
