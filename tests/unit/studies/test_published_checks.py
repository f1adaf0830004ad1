"""Tests that the published rows are consistent, or marked where they contradict themselves."""

import pytest

from paceline.planner.published import PublishedRun, model_of, published_runs
from studies.planner.published_checks import contradictions, model_flops_per_token


def _of(source: str) -> list[PublishedRun]:
    return [run for run in published_runs() if run.source.startswith(source)]


def test_rows_that_contradict_themselves_are_kept_and_marked() -> None:
    marked = {run.id: run.marks for run in published_runs() if run.marks}
    assert marked == {
        run.id: contradictions(run) for run in published_runs() if contradictions(run)
    }
    assert marked["r1105"] == ("axes multiply to 8192 devices",)
    assert len(marked) == 34


@pytest.mark.parametrize("source", ["nemo", "megatron-bridge", "megatron-lm-5"])
def test_tflops_are_those_of_the_tokens(source: str) -> None:
    checked = [run for run in _of(source) if "model_tflops" in run.also and not run.marks]
    for run in checked:
        assert contradictions(run) == ()
    assert len([run for run in checked if model_of(run) is not None]) >= 3


def test_jax_toolbox_sequences_are_tokens() -> None:
    checked = [run for run in _of("jax-toolbox") if "sequences_per_s" in run.also]
    assert checked
    for run in checked:
        assert contradictions(run) == ()


def test_internevo_tokens_do_not_exceed_the_tflops_that_it_states() -> None:
    for run in _of("internevo"):
        known = model_flops_per_token(run)
        assert known is not None
        assert run.measured is not None
        if "tflops" in run.also:
            share = 4 / 3 if run.recompute == "full" else 1
            assert known[1] * run.measured * share / 1e12 == pytest.approx(
                run.also["tflops"], rel=0.1
            )
