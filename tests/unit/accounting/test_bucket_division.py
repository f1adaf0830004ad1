"""How buckets divide a list; that ours are those of the containers is tested with them."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.accounting.bucket_division import bucket_lengths, torch_bucket_lengths

SIZES = st.lists(st.integers(1, 10**7), min_size=1, max_size=50)


@given(SIZES, st.floats(1, 1e8))
def test_every_tensor_is_in_one_bucket(sizes: list[int], cap: float) -> None:
    for lengths in (bucket_lengths(sizes, cap), torch_bucket_lengths(sizes, cap)):
        assert sum(lengths) == len(sizes)
        assert min(lengths) > 0


def test_without_a_cap_there_is_one_and_with_none_one_each() -> None:
    assert bucket_lengths([5, 6, 7], None) == [3]
    assert bucket_lengths([5, 6, 7], 0) == [1, 1, 1]


def test_torch_ends_a_bucket_when_it_is_full() -> None:
    mebibyte = 2**20
    sizes = [mebibyte // 2] * 2 + [2 * mebibyte] * 4
    # The first holds a mebibyte, the others at least the cap of three.
    assert torch_bucket_lengths(sizes, 3 * mebibyte) == [2, 2, 2]
