"""Tests of the study of very many ranks, on a model of a few layers."""

import pytest

from paceline.core import ModelShape
from studies.harness.runs import fake_rank
from studies.parallel import many_ranks

TINY = ModelShape(vocab_size=64, d_model=32, d_ff=64, num_layers=2, num_heads=2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("subject", many_ranks.SUBJECTS)
def test_a_subject_is_measured(subject: str) -> None:
    with fake_rank(64):
        numbers = many_ranks.measure(subject, TINY, repetitions=1)
    assert numbers["python_bytes"] > 0
    assert min(numbers["time_s"]) > 0


def test_growth_is_a_power_of_the_ranks() -> None:
    sizes = [64, 512, 4096]
    assert many_ranks.power_of(sizes, [3.0, 3.0, 3.0]) == pytest.approx(0)
    assert many_ranks.power_of(sizes, [2.0 * size for size in sizes]) == pytest.approx(1)
    assert many_ranks.power_of(sizes, [0, 0, 0]) == 0
