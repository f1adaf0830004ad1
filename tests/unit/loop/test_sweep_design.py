"""Tests of planned runs: buildable, within the budget, and with the rule's hyperparameters."""

import dataclasses
import math
import pathlib

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from paceline.accounting.counts import count_parameters
from paceline.core.errors import UsageError
from paceline.loop.run_config import run_config
from paceline.loop.sweep_design import (
    Rule,
    batch_runs,
    best_factor,
    exploring_runs,
    rate_runs,
    require_sizes,
    rule_finding,
    rule_of_rates,
)
from tests.unit.loop.fake_runs import BASE, SPEC


@hypothesis.given(
    target=st.floats(1e13, 1e25),
    vocab_size=st.sampled_from([256, 4096, 32_000]),
    context_length=st.sampled_from([128, 256, 2048]),
)
@hypothesis.settings(max_examples=8)
def test_runs_keep_the_budget_and_can_be_built(
    target: float, vocab_size: int, context_length: int
) -> None:
    spec = msgspec.structs.replace(
        SPEC,
        target=target,
        largest=target / 8,
        vocab_size=vocab_size,
        context_length=context_length,
        most_tokens=None,
    )
    try:
        runs = exploring_runs(spec, Rule())
    except UsageError:
        # The embeddings of a large vocabulary alone exceed a small budget.
        assert vocab_size > 256
        return
    assert sum(run.flops for run in runs) <= 1.1 * 5 * (1 / 16 + 1 / 8 + 1 / 4) * target / 8
    assert len({run.name for run in runs}) == len(runs)
    for run in runs:
        assert run.flops <= spec.largest / 4 * 1.1
        assert run.parameters == count_parameters(run.shape).total
        assert run.tokens == run.steps * run.batch_size * context_length
        assert 1 <= run.warmup_steps <= run.steps


def test_the_config_of_a_run_is_its_model() -> None:
    for run in (*rate_runs(SPEC), *exploring_runs(SPEC, Rule())):
        config = run_config(BASE, run, pathlib.Path("run"))
        shape = config.model.shape
        assert (shape.head_width, shape.num_kv_heads) == (run.shape.head_width, run.shape.num_heads)
        without = {"num_kv_heads": None, "head_dim": None}
        assert dataclasses.replace(shape, **without) == run.shape
        assert config.training.steps * config.tokens_per_step == run.tokens
        assert config.optimizer.learning_rate == run.learning_rate


def test_runs_see_the_text_as_often_as_is_allowed() -> None:
    few = msgspec.structs.replace(SPEC, most_tokens=2e6)
    assert max(run.tokens for run in exploring_runs(few, Rule())) <= 2e6
    none = msgspec.structs.replace(SPEC, most_tokens=1.0)
    with pytest.raises(UsageError, match="or more text"):
        exploring_runs(none, Rule())


def test_the_check_varies_one_thing_at_a_time() -> None:
    rates = rate_runs(SPEC)
    assert len({run.shape for run in rates}) == 2
    for runs in (rates[:5], rates[5:]):
        assert [run.learning_rate_factor for run in runs] == [1, 0.125, 0.25, 0.5, 2]
        assert len({(run.shape, run.tokens, run.batch_factor) for run in runs}) == 1
    assert rates[5].parameters > 2 * rates[0].parameters
    assert rates[1].learning_rate == pytest.approx(rates[0].learning_rate / 8)
    batches = batch_runs(SPEC, Rule(learning_rate_factor=0.5))
    rule, *_, half, twice = batches
    assert half.batch_size == pytest.approx(rule.batch_size / 2, abs=0.5)
    assert twice.batch_size == pytest.approx(rule.batch_size * 2, abs=1)
    # Adam's learning rate scales with the square root of the batch.
    root = math.sqrt(twice.batch_size / rule.batch_size)
    assert twice.learning_rate == pytest.approx(rule.learning_rate * root)
    assert rule.learning_rate == pytest.approx(rates[0].learning_rate / 2)
    assert {run.shape for run in batches} == {rates[0].shape}
    assert len({run.seed for run in (*rates, *batches)}) == 1


def test_the_rule_is_the_mean_of_the_best_factors_whatever_the_size_and_the_tokens() -> None:
    rule = rule_of_rates([0.2, 0.8])
    assert rule.learning_rate_factor == pytest.approx(0.4)
    # Longer runs have larger batches, and the same learning rate except for rounding to whole
    # sequences.
    short, long = rule.apply(1e6, 2e7, 128), rule.apply(1e6, 2e9, 128)
    assert long.batch_size > 10 * short.batch_size
    assert long.learning_rate == pytest.approx(short.learning_rate, rel=0.02)
    law = 1.79 * 1e6**-0.713 * 2e7**0.307
    assert short.learning_rate == pytest.approx(0.4 * law, rel=0.02)


def test_a_check_that_no_model_is_small_enough_for() -> None:
    tiny = msgspec.structs.replace(SPEC, largest=1e9)
    with pytest.raises(UsageError, match="give more FLOPs"):
        rate_runs(tiny)


def test_a_law_needs_sizes_on_both_sides_of_the_best() -> None:
    require_sizes(SPEC)
    few = msgspec.structs.replace(SPEC, largest=4e11)
    with pytest.raises(UsageError, match=r"only \d of 15 small runs.* times as many FLOPs"):
        require_sizes(few)
    short = msgspec.structs.replace(SPEC, most_tokens=2e5)
    with pytest.raises(UsageError, match=r"only \d of 15 small runs.*prepare more text"):
        require_sizes(short)


@pytest.mark.parametrize("best", [0.5, 0.8, 1.0, 1.7, 2.0])
def test_the_best_factor_of_a_parabola_is_found(best: float) -> None:
    losses = {factor: 2 + 0.1 * math.log(factor / best) ** 2 for factor in (0.5, 1.0, 2.0)}
    assert best_factor(losses) == pytest.approx(best)


def test_factors_stay_within_what_was_tried() -> None:
    assert best_factor({0.5: 3.0, 1.0: 2.0, 2.0: 1.01}) == 2
    assert best_factor({0.5: 1.0, 1.0: 3.0, 2.0: 2.0}) == 0.5
    assert best_factor({0.25: 1.01, 0.5: 2.0, 1.0: 3.0}) == 0.25
    assert best_factor({1.0: 3.0, 2.0: 2.0}) == 2.0


def test_a_rule_that_is_off_is_a_finding_with_its_gain() -> None:
    losses = {0.5: 1.9, 1.0: 2.0, 2.0: 2.4}
    finding = rule_finding("learning_rate_rule", "learning rate", losses, 0.6, 0.7)
    assert "1.9000 at 0.5x, 2.0000 at 1x, 2.4000 at 2x" in finding.message
    assert finding.remedy == "the other runs use 0.7x Step Law; the best loss here is 5.0% lower"
    assert not rule_finding("x", "x", {0.5: 2.0, 1.0: 1.999, 2.0: 2.1}, 0.9, 0.9).remedy


def test_batches_leave_enough_steps() -> None:
    tuned = Rule(batch_factor=16).apply(1e5, 1e6, 256)
    assert tuned.steps >= 60
    assert dataclasses.asdict(tuned)["warmup_steps"] == round(0.05 * tuned.steps)


def test_a_factor_far_from_the_lowest_loss_has_no_say() -> None:
    losses = {factor: 2 + 0.1 * math.log(factor / 0.4) ** 2 for factor in (0.25, 0.5, 1.0)}
    assert best_factor(losses | {2.0: 50.0}) == pytest.approx(0.4)
