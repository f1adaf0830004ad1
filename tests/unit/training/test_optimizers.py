"""Tests that learning rates follow the named schedules."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.training.config import ScheduleConfig
from paceline.training.optimizers import learning_rate_factor


def _curve(num_steps: int, **options: object) -> list[float]:
    schedule = ScheduleConfig(**options)  # type: ignore[arg-type]
    return [learning_rate_factor(schedule, step, num_steps) for step in range(num_steps)]


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    assert _curve(8, name="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]


def test_cosine_falls_to_its_end_with_the_last_step() -> None:
    curve = _curve(101, name="cosine", warmup_steps=1, final_fraction=0.1)
    assert curve[0] == 1
    assert curve[50] == pytest.approx(0.55)
    assert curve[-1] == pytest.approx(0.1)


def test_wsd_is_stable_before_it_decays() -> None:
    curve = _curve(100, name="wsd", warmup_steps=10, decay_fraction=0.2, final_fraction=0)
    assert curve[9:80] == [1.0] * 71
    assert curve[-1] == 0
    assert curve[80] == pytest.approx(0.95)


@given(
    name=st.sampled_from(["cosine", "wsd", "constant"]),
    num_steps=st.integers(1, 300),
    warmup=st.integers(0, 300),
    decay=st.floats(0, 1),
    final=st.floats(0, 1),
)
def test_factors_rise_once_and_then_never_again(
    name: str, num_steps: int, warmup: int, decay: float, final: float
) -> None:
    warmup = min(warmup, num_steps)
    curve = _curve(
        num_steps, name=name, warmup_steps=warmup, decay_fraction=decay, final_fraction=final
    )
    assert all(0 <= factor <= 1 + 1e-12 for factor in curve)
    assert curve[:warmup] == sorted(curve[:warmup])
    after = curve[warmup:]
    assert all(first >= second - 1e-12 for first, second in itertools.pairwise(after))
