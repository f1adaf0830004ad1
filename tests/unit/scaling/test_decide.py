"""Tests that decisions spend their budget, price mistakes, and name buildable models."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.accounting import count_parameters, flops_per_token
from paceline.core.errors import UsageError
from paceline.core.specs import BatchShape, require_buildable
from paceline.scaling import LossSurface, fit, synthetic_sweep
from paceline.scaling.decide import decide
from paceline.scaling.model_shapes import ladder_shape, nearest_shape, plain_ladder, plan_run


@settings(max_examples=60, deadline=None)
@given(st.floats(2e7, 1e13))
def test_shapes_are_near_buildable_and_regular(parameters: float) -> None:
    shape = nearest_shape(parameters, vocab_size=10_000, context_length=512)
    require_buildable(shape)
    assert count_parameters(shape).total == pytest.approx(parameters, rel=0.08)
    step = 64 if shape.d_model < 1024 else 128
    assert shape.d_model % step == 0
    assert shape.d_ff % step == 0
    assert shape.head_width in (64, 128)
    if shape.d_model >= 4096:
        assert shape.num_heads % 8 == 0
    if parameters > 1e8:
        assert count_parameters(shape).total == pytest.approx(parameters, rel=0.03)
        assert 20 < shape.d_model / shape.num_layers < 300


@settings(max_examples=60, deadline=None)
@given(st.floats(3e4, 1e12), st.floats(1.0, 10.0))
def test_a_ladder_has_one_depth_for_every_width(parameters: float, factor: float) -> None:
    small, large = (
        ladder_shape(size, plain_ladder(vocab_size=256, context_length=128))
        for size in (parameters, parameters * factor)
    )
    require_buildable(small)
    assert count_parameters(small).total == pytest.approx(parameters, rel=0.5)
    assert small.head_width % 2 == 0
    assert small.head_width >= 24
    assert small.num_layers >= 3
    assert (small.d_model, small.num_layers) <= (large.d_model, large.num_layers)
    if small.d_model == large.d_model:
        assert small == large


def test_a_vocabulary_that_is_larger_than_the_model() -> None:
    with pytest.raises(UsageError, match="smaller vocabulary"):
        nearest_shape(1e5, vocab_size=100_000, context_length=512)
    with pytest.raises(UsageError, match="smaller vocabulary"):
        ladder_shape(1e5, plain_ladder(vocab_size=100_000, context_length=512))


def test_a_run_spends_exact_flops_in_whole_steps() -> None:
    shape = nearest_shape(1e9, vocab_size=32_000, context_length=2048)
    run = plan_run(shape, 1e20, BatchShape(num_sequences=256, context_length=2048))
    assert run.tokens == run.num_steps * 256 * 2048
    assert run.flops == pytest.approx(1e20, rel=1e-3)
    assert run.flops_per_token == flops_per_token(shape, 2048).model
    # 6N leaves out attention, and counts the embedding, which costs no FLOPs.
    assert run.flops_per_token != pytest.approx(6 * run.parameters, rel=1e-3)


def test_decisions(surface: LossSurface) -> None:
    result = fit(synthetic_sweep(surface, noise=0.003), num_draws=100)
    near, far = decide(result, [1e22, 1e24], batch_tokens=2**20)
    assert far.extrapolation == pytest.approx(1e24 / 3e21)
    methods = [answer.method for answer in far.answers]
    assert methods == ["lowest_run", "parabola", "huber", "parametric"]
    chosen = far.answers[-1]
    assert 6 * chosen.parameters.value * chosen.tokens.value == pytest.approx(1e24)
    assert far.run.parameters == pytest.approx(chosen.parameters.value, rel=0.03)
    assert far.run.tokens_per_step == 2**20
    assert far.profile.value == chosen.parameters.value
    assert far.profile.low < far.profile.value < far.profile.high  # type: ignore[operator]
    assert near.run.num_steps < far.run.num_steps
    by_reason = {waste.reason: waste.wasted for waste in far.waste}
    assert 0 < by_reason["2 times the best N"] < by_reason["4 times the best N"] < 1
    assert 0 < by_reason["0.5 times the best N"] < by_reason["0.25 times the best N"] < 1
    assert by_reason["the lower end of the interval"] < by_reason["0.5 times the best N"]
    assert [waste.parameters for waste in far.waste] == sorted(w.parameters for w in far.waste)


def test_impossible_questions(surface: LossSurface) -> None:
    result = fit(synthetic_sweep(surface), num_draws=10)
    with pytest.raises(UsageError, match="budgets must be positive"):
        decide(result, [-1.0])
    with pytest.raises(UsageError, match="level of intervals is 2"):
        decide(result, [1e22], level=2)
