"""Tests of the study of very many ranks, on a model of a few layers."""

import pytest
import scale_study

from paceline.core import ModelShape

TINY = ModelShape(vocab_size=64, d_model=32, d_ff=64, num_layers=2, num_heads=2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("subject", scale_study.SUBJECTS)
def test_a_subject_is_measured(subject: str) -> None:
    with scale_study.one_rank_of(64):
        numbers = scale_study.measure(subject, TINY, repetitions=1)
    assert numbers["python_bytes"] > 0
    assert min(numbers["time_s"]) > 0


def test_growth_is_a_power_of_the_ranks() -> None:
    sizes = [64, 512, 4096]
    assert scale_study.power_of(sizes, [3.0, 3.0, 3.0]) == pytest.approx(0)
    assert scale_study.power_of(sizes, [2.0 * size for size in sizes]) == pytest.approx(1)
    assert scale_study.power_of(sizes, [0, 0, 0]) == 0
