import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.accounting.counts import divide_into_stages
from paceline.core.errors import UsageError
from paceline.core.specs import ModelShape

_SHAPE = ModelShape(vocab_size=64, d_model=64, d_ff=176, num_layers=8, num_heads=4)


@given(
    num_layers=st.integers(1, 70),
    num_ranks=st.integers(1, 9),
    interleave=st.integers(1, 4),
    vocab_size=st.integers(1, 200_000),
)
def test_every_block_is_in_one_stage_and_every_stage_has_one(
    num_layers: int, num_ranks: int, interleave: int, vocab_size: int
) -> None:
    shape = dataclasses.replace(_SHAPE, num_layers=num_layers, vocab_size=vocab_size)
    if num_layers < num_ranks * interleave:
        with pytest.raises(UsageError, match="take fewer stages"):
            divide_into_stages(shape, 128, num_ranks, interleave)
        return
    stages = divide_into_stages(shape, 128, num_ranks, interleave)
    assert len(stages) == num_ranks * interleave
    assert all(stages)
    assert [block for stage in stages for block in stage] == list(range(num_layers))


def _numbers(vocab_size: int, num_ranks: int, interleave: int = 1) -> list[int]:
    shape = dataclasses.replace(_SHAPE, vocab_size=vocab_size)
    return [len(stage) for stage in divide_into_stages(shape, 128, num_ranks, interleave)]


def test_equal_stages_where_embedding_and_head_are_small() -> None:
    assert _numbers(vocab_size=16, num_ranks=2) == [4, 4]
    assert _numbers(vocab_size=16, num_ranks=2, interleave=2) == [2, 2, 2, 2]


def test_a_stage_with_a_large_head_has_fewer_blocks() -> None:
    # The head has as many weights as two blocks of 64 x (4 x 64 + 3 x 176), plus the loss.
    assert _numbers(vocab_size=2 * 784, num_ranks=2) == [5, 3]
    assert _numbers(vocab_size=2 * 784, num_ranks=4) == [2, 2, 3, 1]


def test_a_remainder_goes_to_a_later_stage() -> None:
    shape = dataclasses.replace(_SHAPE, vocab_size=1, num_layers=10)
    assert [len(stage) for stage in divide_into_stages(shape, 128, 4)] == [2, 3, 3, 2]


def test_interleaved_stages_of_the_rank_with_the_head_have_fewer_blocks_together() -> None:
    numbers = _numbers(vocab_size=2 * 784, num_ranks=2, interleave=2)
    assert numbers[0] + numbers[2] == 5
    assert numbers[1] + numbers[3] == 3
